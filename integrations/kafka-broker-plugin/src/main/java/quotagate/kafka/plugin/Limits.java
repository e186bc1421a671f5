// The limits of a broker: the quotas, the throttle factor, and the number of brokers.
package quotagate.kafka.plugin;

import java.util.Set;
import org.apache.kafka.server.quota.ClientQuotaType;
import org.jspecify.annotations.Nullable;

/**
 * The limits in force; they are replaced as a whole.
 *
 * @param quotas the quotas of the catalog
 * @param factor the throttle factor; 0 is left to the proxy
 * @param brokers the number by which the limits of the cluster are divided
 * @param excluded the principals to which no factor applies
 */
record Limits(Quotas quotas, double factor, int brokers, Set<String> excluded) {
  /** The least limit that a factor leaves, in bytes per second. */
  static final double LEAST = 1;

  Limits with(Quotas read) {
    return new Limits(read, factor, brokers, excluded);
  }

  Limits with(double now) {
    return new Limits(quotas, now, brokers, excluded);
  }

  Limits among(int number) {
    return new Limits(quotas, factor, number, excluded);
  }

  /** Whether no factor applies to a principal. */
  boolean excludes(@Nullable String user) {
    return user != null && excluded.contains(user);
  }

  /**
   * The limit that this broker enforces for a bucket; null without a limit.
   *
   * @param exempt whether no factor applies to the principals that share the bucket
   */
  @Nullable Double limit(ClientQuotaType type, Entity bucket, boolean exempt) {
    Rule rule = quotas.ladder(type).rule(bucket);
    if (rule == null || !rule.enforced()) {
      return null;
    }
    double limit = rule.limit();
    boolean scaled = type == ClientQuotaType.PRODUCE && factor > 0 && factor < 1;
    if (scaled && !exempt && !excludes(bucket.user())) {
      limit = Math.max(LEAST, limit * factor);
    }
    // Changes of topics are counted by the active controller alone.
    boolean divided = !rule.perBroker() && type != ClientQuotaType.CONTROLLER_MUTATION;
    return divided ? limit / brokers : limit;
  }
}
