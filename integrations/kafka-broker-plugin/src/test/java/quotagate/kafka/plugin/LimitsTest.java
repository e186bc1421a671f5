// The limits of a broker: the factor, the number of brokers, and limits left to the proxy.
package quotagate.kafka.plugin;

import static org.apache.kafka.server.quota.ClientQuotaType.CONTROLLER_MUTATION;
import static org.apache.kafka.server.quota.ClientQuotaType.FETCH;
import static org.apache.kafka.server.quota.ClientQuotaType.PRODUCE;
import static org.apache.kafka.server.quota.ClientQuotaType.REQUEST;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.List;
import java.util.Set;
import org.apache.kafka.server.quota.ClientQuotaType;
import org.junit.jupiter.api.Test;

class LimitsTest {
  private static final Entity ALICE = new Entity("alice", null);
  private static final Entity ETL = new Entity(null, "etl");

  private static Limits limits(String... listed) {
    var found = new Quotas.Builder();
    for (String each : listed) {
      try {
        found.add(new ObjectMapper().readTree(each.replace('\'', '"')));
      } catch (JsonProcessingException e) {
        throw new AssertionError(e);
      }
    }
    return new Limits(found.build(), 1, 1, Set.of("repair"));
  }

  private static final Limits ALL =
      limits(
          "{'entity': 'user=*', 'quotas': {'producer_byte_rate': {'limit': 1000},"
              + " 'consumer_byte_rate': {'limit': 600}, 'request_percentage': {'limit': 50},"
              + " 'controller_mutation_rate': {'limit': 3}, 'producer_ids_rate': {'limit': 5},"
              + " 'request_rate': {'limit': 9}}}",
          "{'entity': 'ip=10.0.0.7', 'quotas': {'request_rate': {'limit': 1}}}");

  private static double limit(Limits limits, ClientQuotaType type) {
    Double found = limits.limit(type, ALICE, false);
    return found == null ? Double.NaN : found;
  }

  @Test
  void fourKeysOfClientsAreTaken() {
    assertEquals(4, ALL.quotas().size());
    assertEquals(1000, limit(ALL, PRODUCE));
    assertEquals(600, limit(ALL, FETCH));
    assertEquals(50, limit(ALL, REQUEST));
    assertEquals(3, limit(ALL, CONTROLLER_MUTATION));
    assertNull(ALL.limit(PRODUCE, ETL, false));
  }

  @Test
  void factorScalesProducingAlone() {
    Limits half = ALL.with(0.5);
    assertEquals(500, limit(half, PRODUCE));
    assertEquals(600, limit(half, FETCH));
    assertEquals(50, limit(half, REQUEST));
    assertEquals(3, limit(half, CONTROLLER_MUTATION));
  }

  @Test
  void factorLeavesOneBytePerSecond() {
    assertEquals(1, limit(ALL.with(1e-9), PRODUCE));
  }

  @Test
  void factorOfZeroIsLeftToTheProxy() {
    assertEquals(1000, limit(ALL.with(0.0), PRODUCE));
  }

  @Test
  void noFactorAppliesToExcludedPrincipals() {
    Limits half = ALL.with(0.5);
    assertEquals(1000, half.limit(PRODUCE, new Entity("repair", null), false));
    assertEquals(500, half.limit(PRODUCE, new Entity("repairs", null), false));

    Limits clients =
        limits("{'entity': 'client-id=*', 'quotas': {'producer_byte_rate': {'limit': 8}}}")
            .with(0.5);
    assertEquals(4, clients.limit(PRODUCE, ETL, false));
    assertEquals(8, clients.limit(PRODUCE, ETL, Tags.excluded(Tags.of(ETL, true))));
  }

  @Test
  void limitsAreDividedByBrokers() {
    Limits three = ALL.among(3).with(0.5);
    assertEquals(500.0 / 3, limit(three, PRODUCE));
    assertEquals(200, limit(three, FETCH));
    assertEquals(50.0 / 3, limit(three, REQUEST));
  }

  @Test
  void whatOneNodeCountsForAllIsNotDivided() {
    assertEquals(3, limit(ALL.among(3), CONTROLLER_MUTATION));
    Limits scoped =
        limits(
                "{'entity': 'user=alice', 'quotas':"
                    + " {'producer_byte_rate': {'limit': 1000, 'scope': 'broker'}}}")
            .among(3);
    assertEquals(1000, limit(scoped, PRODUCE));
  }

  @Test
  void limitOfZeroIsLeftToTheProxyAndNamed() {
    Limits zero =
        limits(
            "{'entity': 'user=alice', 'quotas': {'consumer_byte_rate': {'limit': 0}}}",
            "{'entity': 'user=*', 'quotas': {'consumer_byte_rate': {'limit': 10}}}");
    // The rule decides all the same: alice does not fall to the default.
    assertNull(zero.limit(FETCH, ALICE, false));
    assertEquals(List.of("consumer_byte_rate of user=alice"), zero.quotas().zeros());
  }

  @Test
  void shadowLimitsNothing() {
    Limits shadow =
        limits(
            "{'entity': 'user=alice', 'quotas':"
                + " {'producer_byte_rate': {'limit': 0, 'shadow': true}}}",
            "{'entity': 'user=*', 'quotas': {'producer_byte_rate': {'limit': 10}}}");
    assertNull(shadow.limit(PRODUCE, ALICE, false));
    assertEquals(List.of(), shadow.quotas().zeros());
  }
}
