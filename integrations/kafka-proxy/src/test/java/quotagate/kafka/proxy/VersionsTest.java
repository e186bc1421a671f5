// A client sees no range of versions that is empty, whatever the broker knows.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.util.List;
import org.apache.kafka.common.message.ApiVersionsResponseData;
import org.apache.kafka.common.message.ApiVersionsResponseData.ApiVersion;
import org.apache.kafka.common.message.ApiVersionsResponseData.ApiVersionCollection;
import org.apache.kafka.common.protocol.ApiKeys;
import org.junit.jupiter.api.Test;

class VersionsTest {
  private static ApiVersion range(int api, int least, int newest) {
    return new ApiVersion()
        .setApiKey((short) api)
        .setMinVersion((short) least)
        .setMaxVersion((short) newest);
  }

  private static List<Short> left(ApiVersion... ranges) {
    var versions =
        new ApiVersionsResponseData()
            .setApiKeys(new ApiVersionCollection(List.of(ranges).iterator()));
    Versions.leaveOutUnknown(versions);
    return versions.apiKeys().stream().map(ApiVersion::apiKey).toList();
  }

  @Test
  void inverseRangeIsLeftOut() {
    assertEquals(List.of((short) 3), left(range(76, 1, 0), range(3, 0, 12), range(79, 1, 0)));
  }

  @Test
  void leastVersionAboveTheNewestOfTheProxyIsLeftOut() {
    int newest = ApiKeys.SHARE_FETCH.latestVersion(true);
    assertEquals(List.of(), left(range(78, newest + 1, newest + 1)));
    assertEquals(List.of((short) 78), left(range(78, newest, newest + 1)));
  }

  @Test
  void newestVersionBelowTheLeastOfTheProxyIsLeftOut() {
    int least = ApiKeys.FETCH.messageType.lowestSupportedVersion();
    assertEquals(List.of(), left(range(1, 0, least - 1)));
    assertEquals(List.of((short) 1), left(range(1, 0, least)));
  }

  @Test
  void apiThatTheProxyDoesNotKnowIsLeftOut() {
    assertEquals(List.of(), left(range(30_000, 0, 0)));
  }
}
