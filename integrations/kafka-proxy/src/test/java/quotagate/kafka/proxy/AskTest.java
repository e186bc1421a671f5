// Asks are written as Quotagate reads them, whatever names clients choose.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class AskTest {
  private static final Ask.Who WHO = new Ask.Who("alice", "");

  @Test
  void produceNamesBytesAndIds() {
    Ask ask = Ask.produce(WHO, 2048, List.of(4711L, -5L));
    assertEquals(
        "{\"principal\":\"alice\",\"client_id\":\"\",\"usage\":"
            + "{\"requests\":1,\"produce_bytes\":2048,\"producer_ids\":[4711, -5]}}",
        ask.json());
    assertEquals(2, ask.ids());
  }

  @Test
  void lookAtFetchesChargesNothing() {
    assertEquals(
        "{\"principal\":\"alice\",\"client_id\":\"\",\"usage\":{\"fetch_bytes\":1},"
            + "\"mode\":\"peek\",\"detail\":true}",
        Ask.mayFetch(WHO).json());
  }

  @ParameterizedTest
  @ValueSource(strings = {"quo\"ted", "back\\slash", "Zürich, \u2028", "\uD83D\uDE00"})
  void oddNamesStandAsTheyAre(String name) throws Exception {
    var ask = new ObjectMapper().readTree(Ask.request(new Ask.Who(name, name)).json());
    assertEquals(name, ask.path("principal").asText());
    assertEquals(name, ask.path("client_id").asText());
  }

  @Test
  void namesThatWouldFailABatchAreCountedByTheirDigest() {
    String digest = Ask.name("line\nbreak");
    assertEquals(71, digest.length());
    assertNotEquals(digest, Ask.name("line\tbreak"));
    assertNotEquals(Ask.name("\uD800"), Ask.name("\uD801"));
    assertEquals("x".repeat(512), Ask.name("x".repeat(512)));
    assertEquals(71, Ask.name("ü".repeat(257)).length());
  }
}
