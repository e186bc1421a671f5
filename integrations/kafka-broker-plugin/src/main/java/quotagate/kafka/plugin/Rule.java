// One quota of one entity, as far as a broker can enforce it.
package quotagate.kafka.plugin;

/**
 * A limit.
 *
 * @param limit in the unit of its quota key
 * @param shadow whether it only counts, so that a broker lets everything pass
 * @param perBroker whether each broker counts on its own, so that it is not divided
 */
record Rule(double limit, boolean shadow, boolean perBroker) {
  /** Whether a broker enforces it; 0 overflows the delay that Kafka reckons. */
  boolean enforced() {
    return limit > 0 && !shadow;
  }
}
