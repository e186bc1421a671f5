// Buckets as the tags of Kafka's metrics: clients with the same tags share a limit.
package quotagate.kafka.plugin;

import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.kafka.common.utils.Sanitizer;

/**
 * The tags of a bucket, as in Kafka's own quotas: {@code user} and {@code client-id}, empty where
 * the bucket has none.
 *
 * <p>Kafka names a sensor by the tags' values, joined by colons in their order. A user's name is
 * encoded, so it has no colon; the mark comes first and is no encoded name.
 */
final class Tags {
  static final String USER = "user";
  static final String CLIENT = "client-id";

  /** The tag that distinguishes buckets with the same names; most buckets have none. */
  static final String MARK = "bucket";

  /** The pair of a user and the empty client-id, and not the user. */
  static final String PAIR = "%pair";

  /** A client-id, of principals to which no throttle factor applies. */
  static final String EXCLUDED = "%excluded";

  private Tags() {}

  static Map<String, String> of(Entity bucket, boolean excluded) {
    String user = bucket.user();
    String client = bucket.client();
    Map<String, String> tags = new LinkedHashMap<>(4);
    if (user != null && client != null && client.isEmpty()) {
      tags.put(MARK, PAIR);
    } else if (user == null && excluded) {
      tags.put(MARK, EXCLUDED);
    }
    tags.put(USER, user == null ? "" : encoded(user));
    tags.put(CLIENT, client == null ? "" : client);
    return tags;
  }

  /** The bucket that has these tags. */
  static Entity bucket(Map<String, String> tags) {
    String user = tags.getOrDefault(USER, "");
    String client = tags.getOrDefault(CLIENT, "");
    if (user.isEmpty()) {
      return new Entity(null, client);
    }
    boolean pair = !client.isEmpty() || PAIR.equals(tags.get(MARK));
    return new Entity(Sanitizer.desanitize(user), pair ? client : null);
  }

  /** Whether these are tags of a client-id's bucket to which no throttle factor applies. */
  static boolean excluded(Map<String, String> tags) {
    return EXCLUDED.equals(tags.get(MARK));
  }

  // Most names need no encoding, and this runs for each request.
  private static String encoded(String name) {
    for (int at = 0; at < name.length(); at++) {
      char each = name.charAt(at);
      boolean plain =
          (each >= 'a' && each <= 'z')
              || (each >= 'A' && each <= 'Z')
              || (each >= '0' && each <= '9')
              || each == '-'
              || each == '_'
              || each == '.';
      if (!plain) {
        return Sanitizer.sanitize(name);
      }
    }
    return name;
  }
}
