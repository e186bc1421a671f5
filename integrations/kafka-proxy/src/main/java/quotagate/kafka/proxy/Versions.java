// The versions that a client may use: those that the broker and this proxy both know.
package quotagate.kafka.proxy;

import org.apache.kafka.common.message.ApiVersionsResponseData;
import org.apache.kafka.common.message.ApiVersionsResponseData.ApiVersion;
import org.apache.kafka.common.protocol.ApiKeys;

/** The answer to ApiVersions. */
final class Versions {
  private Versions() {}

  /**
   * Leave out every API of which the proxy knows no version that the broker has. The proxy lowers
   * the newest version and leaves the least, which would be a range such as 1 to 0; clients refuse
   * the whole answer for it.
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
