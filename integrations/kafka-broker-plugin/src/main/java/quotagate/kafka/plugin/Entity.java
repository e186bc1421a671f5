// The entity that a quota is set on, and that a bucket belongs to.
package quotagate.kafka.plugin;

import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import org.jspecify.annotations.Nullable;

/**
 * A user, a client-id, or both.
 *
 * @param user a name, {@link #DEFAULT}, or null if the entity has no user
 * @param client likewise the client-id
 */
record Entity(@Nullable String user, @Nullable String client) {
  /** Means every name. Quotagate takes no name with a control character. */
  static final String DEFAULT = "\0";

  /**
   * Read an entity as Quotagate spells it, such as {@code user=alice,client-id=%2A}.
   *
   * @return null for an entity of another type, such as an address
   */
  @Nullable
  static Entity parse(String spelled) {
    String user = null;
    String client = null;
    for (String part : spelled.split(",", -1)) {
      int equals = part.indexOf('=');
      String name = equals < 0 ? "" : name(part.substring(equals + 1));
      switch (equals < 0 ? part : part.substring(0, equals)) {
        case "user" -> user = name;
        case "client-id" -> client = name;
        default -> {
          return null;
        }
      }
    }
    return new Entity(user, client);
  }

  private static String name(String spelled) {
    return spelled.equals("*")
        ? DEFAULT
        : URLDecoder.decode(spelled.replace("+", "%2B"), StandardCharsets.UTF_8);
  }
}
