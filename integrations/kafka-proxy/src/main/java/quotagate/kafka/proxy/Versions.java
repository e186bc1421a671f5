// The versions that a client may use: the broker and this proxy both know them.
package quotagate.kafka.proxy;

import org.apache.kafka.common.message.ApiVersionsResponseData;
import org.apache.kafka.common.message.ApiVersionsResponseData.ApiVersion;
import org.apache.kafka.common.protocol.ApiKeys;

/** The answer to ApiVersions. */
final class Versions {
  private Versions() {}

  /**
   * Leave out every API without a version that both the proxy and the broker know. The proxy lowers
   * the newest version and keeps the oldest, which would make a range such as 1 to 0; clients
   * refuse the whole answer then.
   */
  static void leaveOutUnknown(ApiVersionsResponseData versions) {
    versions.apiKeys().removeIf(Versions::isUnknown);
  }

  private static boolean isUnknown(ApiVersion range) {
    if (range.minVersion() > range.maxVersion() || !ApiKeys.hasId(range.apiKey())) {
      return true;
    }
    ApiKeys known = ApiKeys.forId(range.apiKey());
    return range.minVersion() > known.latestVersion(true)
        || range.maxVersion() < known.messageType.lowestSupportedVersion();
  }
}
