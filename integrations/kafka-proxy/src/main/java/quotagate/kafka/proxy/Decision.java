// Quotagate's answer, or the policy in its place.
package quotagate.kafka.proxy;

import com.fasterxml.jackson.databind.JsonNode;

/**
 * A decision.
 *
 * @param verdict whether the work may be done
 * @param throttleMs how long to wait; above 0 for delay and throttle
 * @param quota the quota that decided, or empty
 * @param largestFetch how many bytes may be fetched now; only after {@link Ask#mayFetch}
 * @param counted whether a quota counts this work
 */
record Decision(Verdict verdict, int throttleMs, String quota, long largestFetch, boolean counted) {
  static final int FAILURE_THROTTLE_MS = 1_000;
  static final Decision ADMIT = of(Verdict.ADMIT, 0);

  /** The policy for failures that lets work wait. */
  static final Decision WAIT = of(Verdict.THROTTLE, FAILURE_THROTTLE_MS);

  /** In the order of how much they forbid. */
  enum Verdict {
    ADMIT,
    DELAY,
    THROTTLE,
    REJECT
  }

  static Decision of(Verdict verdict, int throttleMs) {
    return new Decision(verdict, throttleMs, "", Long.MAX_VALUE, false);
  }

  /** A decision as Quotagate spells it. */
  static Decision of(JsonNode answer) {
    long largest = Long.MAX_VALUE;
    for (JsonNode quota : answer.path("quotas")) {
      if (quota.path("quota").asText().equals("consumer_byte_rate")
          && !quota.path("shadow").asBoolean()
          && quota.path("enforcement").asText().equals("deny")) {
        largest = Math.min(largest, Math.max(1, (long) quota.path("remaining").asDouble()));
      }
    }
    Verdict verdict =
        switch (answer.path("decision").asText()) {
          case "admit" -> Verdict.ADMIT;
          case "delay" -> Verdict.DELAY;
          case "throttle" -> Verdict.THROTTLE;
          case "reject" -> Verdict.REJECT;
          default -> throw new IllegalArgumentException("not a decision: " + answer);
        };
    return new Decision(
        verdict,
        answer.path("throttle_ms").asInt(),
        answer.path("limited_by").path("quota").asText(""),
        largest,
        answer.path("applied").asInt() > 0);
  }

  /** Whether a quota on requests decided; it holds requests of every kind. */
  boolean limitsRequests() {
    return quota.startsWith("request_");
  }

  /** The stricter of two decisions. */
  Decision or(Decision other) {
    int order = verdict.compareTo(other.verdict);
    return order > 0 || (order == 0 && throttleMs >= other.throttleMs) ? this : other;
  }
}
