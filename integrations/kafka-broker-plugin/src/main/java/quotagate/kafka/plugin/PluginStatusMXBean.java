// The plugin's status in JMX.
package quotagate.kafka.plugin;

import org.jspecify.annotations.Nullable;

/** The plugin's state in one broker or controller. */
public interface PluginStatusMXBean {
  /** How often Quotagate was asked for changes. */
  long getPolls();

  /** How many of those polls failed. */
  long getFailedPolls();

  /** How many polls failed in a row until now. */
  long getFailedPollsInARow();

  /** The reason of the last failure; empty if there was none. */
  String getLastFailure();

  /** Milliseconds since Quotagate answered last; -1 if it never did. */
  long getLastAnswerAgeMs();

  /** The catalog's version as an ETag; null if no quotas were read yet, or while they change. */
  @Nullable String getVersion();

  /** How many quotas the broker has. */
  int getQuotas();

  /** How many quotas have a limit of 0, and are left to the proxy. */
  int getQuotasLeftToProxy();

  /** The throttle factor as Quotagate has it; 0 is left to the proxy. */
  double getThrottleFactor();

  /** By how many brokers limits are divided. */
  int getBrokers();
}
