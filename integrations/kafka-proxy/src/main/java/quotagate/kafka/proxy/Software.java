// The error that makes a client wait and try again, which depends on its software.
package quotagate.kafka.proxy;

import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.kafka.common.message.ProduceRequestData;
import org.apache.kafka.common.protocol.Errors;

/**
 * A client's software, as it names itself in ApiVersions from version 3 on; README.md lists the
 * tested clients.
 */
record Software(String name, String version) {
  static final Software UNKNOWN = new Software("", "");

  private static final Pattern VERSION = Pattern.compile("(\\d+)\\.(\\d+).*");

  /** The error of a produce request whose hold is used up. */
  Errors throttled() {
    // Every client retries 19. To librdkafka 89 is permanent, and older clients do not know it.
    return knowsError() ? Errors.THROTTLING_QUOTA_EXCEEDED : Errors.NOT_ENOUGH_REPLICAS;
  }

  /**
   * Whether a produce request is held for as long as possible, rather than answered with the error.
   * Clients count errors, and some give up after three.
   *
   * @param throttleMs how long it has to wait
   * @param leftMs how long it may still be held
   */
  boolean isHeldFor(long throttleMs, long leftMs) {
    if (name.equals("kafka-python") && knowsError()) {
      return false; // it pauses by itself for the throttle time, and counts no errors
    }
    // A client that knows the error pauses for its throttle time. Then a hold that does not last
    // would only keep other requests waiting.
    return countsErrors() || throttleMs <= leftMs;
  }

  /** Whether the client may give up after a few errors, for all that is known of it. */
  boolean countsErrors() {
    return !knowsError();
  }

  /**
   * How long a produce request may be held: half of the timeout in it. The client gives the request
   * up after that timeout, or later.
   */
  long holdMs(ProduceRequestData request) {
    // Without acknowledgements nothing is awaited; sarama's timeout is the broker's part of 30 s.
    boolean isPatient = request.acks() == 0 || name.equals("sarama");
    long half = request.timeoutMs() / 2;
    return isPatient ? QuotaFilter.LONGEST_HOLD_MS : Math.min(QuotaFilter.LONGEST_HOLD_MS, half);
  }

  private boolean knowsError() {
    return switch (name) {
      case "apache-kafka-java" -> isFrom(2, 7); // the first with this error
      case "kafka-python" -> isFrom(3, 0);
      case "kgo" -> true;
      default -> false;
    };
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
