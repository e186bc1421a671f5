// The plugin as a broker sees it, next to a node that changes, fails and returns.
package quotagate.kafka.plugin;

import static org.apache.kafka.server.quota.ClientQuotaType.CONTROLLER_MUTATION;
import static org.apache.kafka.server.quota.ClientQuotaType.FETCH;
import static org.apache.kafka.server.quota.ClientQuotaType.PRODUCE;
import static org.apache.kafka.server.quota.ClientQuotaType.REQUEST;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.BooleanSupplier;
import java.util.stream.IntStream;
import javax.management.JMException;
import javax.management.ObjectName;
import org.apache.kafka.common.Cluster;
import org.apache.kafka.common.security.auth.KafkaPrincipal;
import org.apache.kafka.server.quota.ClientQuotaType;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

@Timeout(120)
class QuotagateTest {
  private static final KafkaPrincipal ALICE = new KafkaPrincipal("User", "alice");

  @TempDir private Path folder;
  private Node node;
  private Quotagate plugin;
  private Path key;
  private int port;

  @BeforeEach
  void startNode() throws IOException {
    node = new Node(0);
    port = node.port();
    key = Files.writeString(folder.resolve("key"), "secret\n");
    plugin = new Quotagate();
  }

  @AfterEach
  void stop() {
    plugin.close();
    node.close();
  }

  private void configure(String... settings) {
    Map<String, String> given = new HashMap<>();
    given.put(Settings.URL, "http://127.0.0.1:" + port);
    given.put(Settings.KEY_FILE, key.toString());
    given.put(Settings.POLL_MS, "50");
    for (int at = 0; at < settings.length; at += 2) {
      given.put(settings[at], settings[at + 1]);
    }
    plugin.configure(given);
  }

  private Double limit(ClientQuotaType type) {
    return plugin.quotaLimit(type, plugin.quotaMetricTags(type, ALICE, "etl"));
  }

  private void eventually(BooleanSupplier holds) throws InterruptedException {
    while (!holds.getAsBoolean()) {
      Thread.sleep(5);
    }
  }

  private Object shown(String attribute) {
    try {
      var name = new ObjectName("quotagate:type=KafkaBrokerPlugin,number=0");
      return ManagementFactory.getPlatformMBeanServer().getAttribute(name, attribute);
    } catch (JMException e) {
      throw new AssertionError(e);
    }
  }

  private long shownNumber(String attribute) {
    return ((Number) shown(attribute)).longValue();
  }

  /** Wait until this many more polls have ended. */
  private void polls(long more) throws InterruptedException {
    long until = shownNumber("Polls") + more;
    eventually(() -> shownNumber("Polls") >= until);
  }

  @Test
  void limitsAreReadAndChange() throws InterruptedException {
    node.list("user=alice", "producer_byte_rate", 100);
    configure();
    eventually(() -> limit(PRODUCE) != null);
    assertEquals(100, limit(PRODUCE));
    assertNull(limit(FETCH));
    assertEquals(Map.of("user", "alice", "client-id", ""), tags(PRODUCE));
    assertEquals(Map.of("user", "", "client-id", "etl"), tags(FETCH));

    node.list("user=alice,client-id=*", "producer_byte_rate", 70);
    polls(2);
    assertEquals(70, limit(PRODUCE));
    assertEquals(Map.of("user", "alice", "client-id", "etl"), tags(PRODUCE));

    node.list();
    polls(2);
    assertNull(limit(PRODUCE));
  }

  private Map<String, String> tags(ClientQuotaType type) {
    return plugin.quotaMetricTags(type, ALICE, "etl");
  }

  @Test
  void brokerIsAskedToReadLimitsAgainOnceAndOnlyWhereTheyChanged() throws InterruptedException {
    node.list("user=alice", "producer_byte_rate", 100, "user=bob", "consumer_byte_rate", 5);
    configure();
    eventually(() -> limit(PRODUCE) != null);
    assertTrue(plugin.quotaResetRequired(PRODUCE));
    assertFalse(plugin.quotaResetRequired(PRODUCE));
    assertTrue(plugin.quotaResetRequired(FETCH));
    assertFalse(plugin.quotaResetRequired(REQUEST));
    assertFalse(plugin.quotaResetRequired(CONTROLLER_MUTATION));

    polls(3);
    assertFalse(plugin.quotaResetRequired(PRODUCE));

    node.list("user=alice", "producer_byte_rate", 100, "user=bob", "consumer_byte_rate", 6);
    polls(2);
    assertFalse(plugin.quotaResetRequired(PRODUCE));
    assertTrue(plugin.quotaResetRequired(FETCH));

    node.factor("0.5");
    polls(2);
    assertTrue(plugin.quotaResetRequired(PRODUCE));
    assertEquals(50, limit(PRODUCE));
    assertFalse(plugin.quotaResetRequired(FETCH));
  }

  @Test
  void catalogThatIsAsItWasCostsOneEntity() throws InterruptedException {
    node.list("user=alice", "producer_byte_rate", 100);
    configure();
    eventually(() -> limit(PRODUCE) != null);
    polls(2);
    node.asked.clear();
    polls(3);
    assertTrue(node.asked.contains("/v1/quotas?limit=1 \"1\""), node.asked.toString());
    assertFalse(node.asked.stream().anyMatch(each -> each.contains("1000")), node.asked.toString());
    assertEquals("\"1\"", shown("Version"));
  }

  @Test
  void everyPageIsRead() throws InterruptedException {
    Object[] triples =
        IntStream.range(0, 7)
            .boxed()
            .flatMap(n -> List.<Object>of("user=u" + n, "consumer_byte_rate", n + 1).stream())
            .toArray();
    node.list(triples);
    configure();
    eventually(() -> shownNumber("Quotas") == 7);
    var last = new KafkaPrincipal("User", "u6");
    assertEquals(7, plugin.quotaLimit(FETCH, plugin.quotaMetricTags(FETCH, last, "")));
  }

  @Test
  void pagesOfSeveralVersionsAreReadAgain() throws InterruptedException {
    node.list(
        "user=a",
        "consumer_byte_rate",
        1,
        "user=alice",
        "consumer_byte_rate",
        2,
        "user=c",
        "consumer_byte_rate",
        3);
    node.changing(true);
    configure();
    eventually(() -> limit(FETCH) != null);
    polls(2);
    assertNull(shown("Version"));
    node.changing(false);
    eventually(() -> shown("Version") != null);
    assertEquals(2, limit(FETCH));
  }

  @Test
  void lastLimitsStayWhileQuotagateIsAway() throws InterruptedException, IOException {
    node.list("user=alice", "producer_byte_rate", 100);
    node.factor("0.5");
    configure();
    eventually(() -> limit(PRODUCE) != null && limit(PRODUCE) == 50);
    plugin.quotaResetRequired(PRODUCE);
    node.close();
    eventually(() -> shownNumber("FailedPollsInARow") >= 3);
    assertEquals(50, limit(PRODUCE));
    assertFalse(plugin.quotaResetRequired(PRODUCE));

    node = new Node(port);
    // Another catalog, at the version of the lost one.
    node.list("user=alice", "producer_byte_rate", 300);
    eventually(() -> limit(PRODUCE) == 300);
    assertTrue(plugin.quotaResetRequired(PRODUCE));
    eventually(() -> shownNumber("FailedPollsInARow") == 0);
    assertTrue(shownNumber("FailedPolls") >= 3);
    assertTrue(shownNumber("LastAnswerAgeMs") >= 0);
  }

  @Test
  void nothingIsLimitedWhereQuotagateNeverWas() throws InterruptedException, IOException {
    node.close();
    configure();
    eventually(() -> shownNumber("FailedPollsInARow") >= 2);
    assertEquals(-1, shownNumber("LastAnswerAgeMs"));
    assertFalse(((String) shown("LastFailure")).isEmpty());
    for (ClientQuotaType type : ClientQuotaType.values()) {
      assertNull(limit(type));
      assertFalse(plugin.quotaResetRequired(type));
      assertEquals(Map.of("user", "", "client-id", "etl"), tags(type));
    }

    node = new Node(port);
    node.list("user=alice", "producer_byte_rate", 100);
    eventually(() -> limit(PRODUCE) != null);
  }

  @Test
  void answersThatCannotBeUsedChangeNothingAndAreCounted() throws InterruptedException {
    node.list("user=alice", "producer_byte_rate", 100);
    configure();
    eventually(() -> limit(PRODUCE) != null);
    node.status(503);
    eventually(() -> shownNumber("FailedPollsInARow") >= 1);
    assertTrue(((String) shown("LastFailure")).contains("503"), (String) shown("LastFailure"));
    node.status(200);
    node.garbled(true);
    node.list();
    eventually(() -> !((String) shown("LastFailure")).contains("503"));
    assertEquals(100, limit(PRODUCE));
    node.garbled(false);
    eventually(() -> limit(PRODUCE) == null);
  }

  @Test
  void factorIsFollowedWhileQuotasCannotBeRead() throws InterruptedException {
    node.list("user=alice", "producer_byte_rate", 100);
    node.factor("\"none\"");
    configure();
    eventually(() -> limit(PRODUCE) != null);
    eventually(() -> shownNumber("FailedPolls") > 0);
    assertEquals(100, limit(PRODUCE));
    node.factor("0");
    eventually(() -> shown("ThrottleFactor").equals(0.0));
    assertEquals(100, limit(PRODUCE));
  }

  @Test
  void replacedKeyIsReadAgain() throws InterruptedException, IOException {
    node.list("user=alice", "producer_byte_rate", 100);
    configure();
    eventually(() -> limit(PRODUCE) != null);
    node.key("other");
    eventually(() -> ((String) shown("LastFailure")).contains("401"));
    Files.writeString(key, "other");
    node.list("user=alice", "producer_byte_rate", 200);
    eventually(() -> limit(PRODUCE) == 200);
  }

  @Test
  void silenceIsAFailure() throws InterruptedException, IOException {
    try (var silent = new ServerSocket(0, 10, InetAddress.getLoopbackAddress())) {
      port = silent.getLocalPort();
      configure(Settings.TIMEOUT_MS, "100");
      eventually(() -> shownNumber("FailedPollsInARow") >= 2);
      assertNull(limit(PRODUCE));
    }
  }

  @Test
  void fileWithoutKeyIsAFailureThatShowsNothing() throws InterruptedException, IOException {
    Files.writeString(key, "a secret\nof two lines");
    configure();
    eventually(() -> shownNumber("FailedPolls") > 0);
    assertEquals("no key in " + key, shown("LastFailure"));
    assertEquals(List.of(), node.asked);
  }

  @Test
  void failuresAreFollowedByLongerWaits() {
    assertEquals(500, Poller.waitMs(500, 0, 1));
    assertEquals(1_000, Poller.waitMs(500, 1, 1));
    assertEquals(4_000, Poller.waitMs(500, 3, 1));
    assertEquals(5_000, Poller.waitMs(500, 4, 1));
    assertEquals(5_000, Poller.waitMs(500, 1_000_000_000L, 1));
    assertEquals(2_500, Poller.waitMs(500, 1_000_000_000L, 0));
    assertEquals(60_000, Poller.waitMs(60_000, 5, 1));
  }

  @Test
  void limitsAreDividedByTheBrokersThatAreAlive() throws InterruptedException {
    node.list("user=alice", "producer_byte_rate", 100);
    configure(Settings.BROKERS, "auto");
    eventually(() -> limit(PRODUCE) != null);
    assertEquals(100, limit(PRODUCE));
    assertTrue(plugin.updateClusterMetadata(cluster(4)));
    assertFalse(plugin.updateClusterMetadata(cluster(4)));
    assertFalse(plugin.updateClusterMetadata(cluster(0)));
    assertEquals(25, limit(PRODUCE));
    assertEquals(4, shownNumber("Brokers"));
  }

  @Test
  void fixedNumberOfBrokersIsNotCounted() throws InterruptedException {
    node.list("user=alice", "producer_byte_rate", 100);
    configure(Settings.BROKERS, "2");
    eventually(() -> limit(PRODUCE) != null);
    assertFalse(plugin.updateClusterMetadata(cluster(4)));
    assertEquals(50, limit(PRODUCE));
  }

  /** As a broker gives it: each broker once for each of its listeners. */
  private static Cluster cluster(int brokers) {
    var nodes =
        IntStream.range(0, 3 * brokers)
            .mapToObj(at -> new org.apache.kafka.common.Node(at / 3, "broker", 9092 + at % 3))
            .toList();
    return new Cluster("cluster", nodes, List.of(), Set.of(), Set.of(), null);
  }

  @Test
  void excludedPrincipalsHaveBucketsOfTheirOwnWhereClientsShare() throws InterruptedException {
    node.list("client-id=*", "producer_byte_rate", 100);
    node.factor("0.5");
    configure(Settings.EXCLUDED, "alice");
    eventually(() -> limit(PRODUCE) != null);
    assertEquals(100, limit(PRODUCE));
    var bob = new KafkaPrincipal("User", "bob");
    eventually(() -> plugin.quotaLimit(PRODUCE, plugin.quotaMetricTags(PRODUCE, bob, "etl")) == 50);
    assertEquals(tags(FETCH), plugin.quotaMetricTags(FETCH, bob, "etl"));
  }

  @Test
  void clientWithoutClientIdIsTheEmptyOne() throws InterruptedException {
    node.list("user=*,client-id=*", "producer_byte_rate", 100);
    configure();
    eventually(() -> shownNumber("Quotas") == 1);
    assertEquals(100, plugin.quotaLimit(PRODUCE, plugin.quotaMetricTags(PRODUCE, ALICE, null)));
  }

  @Test
  void twoPluginsOfAProcessAreShownApart() throws InterruptedException, JMException {
    node.list("user=alice", "producer_byte_rate", 100);
    configure();
    var first = plugin;
    plugin = new Quotagate();
    configure();
    eventually(() -> limit(PRODUCE) != null);
    var server = ManagementFactory.getPlatformMBeanServer();
    var names = new ObjectName("quotagate:type=KafkaBrokerPlugin,*");
    assertEquals(2, server.queryNames(names, null).size());
    first.close();
    assertEquals(1, server.queryNames(names, null).size());
  }
}
