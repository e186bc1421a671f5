// One quota of one entity, as far as a broker can enforce it.
package quotagate.kafka.plugin;

/**
 * A limit.
 *
 * @param limit in the unit of its quota key
 * @param shadow whether the quota only counts, so that a broker lets everything pass
 * @param perBroker whether each broker counts on its own, so that the limit is not divided
 */
record Rule(double limit, boolean shadow, boolean perBroker) {
  /** Whether a broker enforces the limit; with 0 Kafka's delay overflows. */
  boolean enforced() {
    return limit > 0 && !shadow;
  }
}
