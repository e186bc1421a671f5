// The usage of one request of a client, as Quotagate reads it.
package quotagate.kafka.proxy;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Collection;
import java.util.HexFormat;

/**
 * An ask, encoded.
 *
 * @param json the ask as in a batch
 * @param bytes its length in UTF-8
 * @param ids how many producer ids it names
 */
record Ask(String json, int bytes, int ids) {
  static final int MAX_NAME_BYTES = 512;
  static final int MAX_IDS = 1_000;

  /** The caller: the principal that the broker accepted, and the client-id of the request. */
  record Who(String principal, String clientId) {
    private String json() {
      return "\"principal\":%s,\"client_id\":%s"
          .formatted(quoted(name(principal)), quoted(name(clientId)));
    }
  }

  /** A request of a kind that no other quota counts. */
  static Ask request(Who who) {
    return of(who, "\"requests\":1", 0, "");
  }

  /** A produce request: bytes of its records, and the producer ids in them. */
  static Ask produce(Who who, long bytes, Collection<Long> ids) {
    String usage = "\"requests\":1,\"produce_bytes\":" + bytes;
    return of(who, ids.isEmpty() ? usage : usage + ",\"producer_ids\":" + ids, ids.size(), "");
  }

  /** Creating, deleting or adding this many partitions. */
  static Ask mutations(Who who, long partitions) {
    return of(who, "\"requests\":1,\"mutations\":" + partitions, 0, "");
  }

  /** A peek at how much may be fetched now; it charges nothing. */
  static Ask mayFetch(Who who) {
    return of(who, "\"fetch_bytes\":1", 0, ",\"mode\":\"peek\",\"detail\":true");
  }

  /** Bytes that were fetched. */
  static Ask fetched(Who who, long bytes) {
    return of(who, "\"fetch_bytes\":" + bytes, 0, ",\"mode\":\"record\"");
  }

  private static Ask of(Who who, String usage, int ids, String rest) {
    String json = "{%s,\"usage\":{%s}%s}".formatted(who.json(), usage, rest);
    return new Ask(json, json.getBytes(StandardCharsets.UTF_8).length, ids);
  }

  /**
   * A name that Quotagate takes: one invalid name would fail its whole batch. A name that is too
   * long or has control characters becomes its digest, so that it is counted, and on its own.
   */
  static String name(String name) {
    byte[] bytes = name.getBytes(StandardCharsets.UTF_8);
    boolean taken =
        bytes.length <= MAX_NAME_BYTES
            && name.equals(new String(bytes, StandardCharsets.UTF_8)) // no lone surrogates
            && name.chars().noneMatch(Character::isISOControl);
    return taken ? name : "sha256:" + HexFormat.of().formatHex(digest(name));
  }

  private static byte[] digest(String name) {
    try {
      // Its raw characters: an encoding would make all lone surrogates the same.
      ByteBuffer characters = ByteBuffer.allocate(Character.BYTES * name.length());
      characters.asCharBuffer().put(name);
      return MessageDigest.getInstance("SHA-256").digest(characters.array());
    } catch (NoSuchAlgorithmException e) {
      throw new IllegalStateException(e);
    }
  }

  private static String quoted(String name) {
    return '"' + name.replace("\\", "\\\\").replace("\"", "\\\"") + '"';
  }
}
