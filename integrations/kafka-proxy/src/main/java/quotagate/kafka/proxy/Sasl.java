// Learns a connection's principal from SASL PLAIN and SCRAM, once the broker accepted it.
package quotagate.kafka.proxy;

import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Locale;
import org.jspecify.annotations.Nullable;

/** The principal of a connection, as far as it is known. */
final class Sasl {
  static final String ANONYMOUS = "ANONYMOUS";

  /** The mechanisms whose names can be learnt. */
  static final List<String> MECHANISMS = List.of("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512");

  private String principal = ANONYMOUS;
  private String mechanism = "";
  @Nullable private String claimed;
  private int answers;

  /** The principal; {@link #ANONYMOUS} until a broker accepted a name. */
  String principal() {
    return principal;
  }

  /** Begin with a mechanism; false if it does not show the client's name. */
  boolean begin(String chosen) {
    mechanism = chosen.toUpperCase(Locale.ROOT);
    claimed = null;
    answers = 0;
    return MECHANISMS.contains(mechanism);
  }

  /** Take a message of the client; false if no name can be read from it. */
  boolean sent(byte[] message) {
    if (claimed == null) {
      String text = new String(message, StandardCharsets.UTF_8);
      claimed = mechanism.equals("PLAIN") ? plain(text) : scram(text);
    }
    return claimed != null;
  }

  /** Take a positive answer of the broker; SCRAM has two of them. */
  void accepted() {
    answers++;
    boolean complete = mechanism.equals("PLAIN") || answers == 2;
    if (complete && claimed != null) {
      principal = claimed;
    }
  }

  /**
   * {@code [authorization] NUL name NUL password}, RFC 4616; a broker takes no other authorization.
   */
  @Nullable
  private static String plain(String text) {
    String[] parts = text.split("\0", -1);
    return parts.length == 3 && !parts[1].isEmpty() ? parts[1] : null;
  }

  /** {@code n,[a=authorization],n=name,r=nonce[,extensions]}, RFC 5802. */
  @Nullable
  private static String scram(String text) {
    String[] parts = text.split(",", -1);
    if (parts.length < 4 || !parts[2].startsWith("n=") || !parts[3].startsWith("r=")) {
      return null;
    }
    for (String extension : List.of(parts).subList(3, parts.length)) {
      if (extension.equals("tokenauth=true")) {
        return null; // the name of a delegation token is not its owner's
      }
    }
    String name = parts[2].substring(2).replace("=2C", ",").replace("=3D", "=");
    return name.isEmpty() ? null : name;
  }
}
