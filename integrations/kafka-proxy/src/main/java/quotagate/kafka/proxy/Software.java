// Which error makes a client wait and try again: that depends on the program it is made with.
package quotagate.kafka.proxy;

import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.kafka.common.protocol.Errors;

/**
 * A client's software, as it names itself in ApiVersions from version 3 on; README.md has the table
 * of what was tried.
 */
record Software(String name, String version) {
  static final Software UNKNOWN = new Software("", "");

  private static final Pattern VERSION = Pattern.compile("(\\d+)\\.(\\d+).*");

  /** The error of a produce request that has to wait. */
  Errors throttled() {
    boolean knows =
        switch (name) {
          case "apache-kafka-java" -> isFrom(2, 7); // the first with this error
          case "kafka-python" -> isFrom(3, 0);
          default -> false;
        };
    // Every client retries 19. To librdkafka 89 is permanent, and older clients do not know it.
    return knows ? Errors.THROTTLING_QUOTA_EXCEEDED : Errors.NOT_ENOUGH_REPLICAS;
  }

  private boolean isFrom(int major, int minor) {
    Matcher found = VERSION.matcher(version);
    if (!found.matches()) {
      return false;
    }
    int own = Integer.parseInt(found.group(1));
    return own > major || (own == major && Integer.parseInt(found.group(2)) >= minor);
  }
}
