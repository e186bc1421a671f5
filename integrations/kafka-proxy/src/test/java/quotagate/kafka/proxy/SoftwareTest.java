// Each client gets an error that it retries, and is held where it counts them.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertEquals;

import org.apache.kafka.common.message.ProduceRequestData;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class SoftwareTest {
  @ParameterizedTest
  @CsvSource({
    "apache-kafka-java, 4.0.0, 89",
    "apache-kafka-java, 2.7.0, 89",
    "apache-kafka-java, 2.6.3, 19",
    "apache-kafka-java, unknown, 19",
    "kafka-python, 3.0.12, 89",
    "kafka-python, 2.0.2, 19",
    "kgo, v1.22.3, 89",
    "kgo, unknown, 89",
    "sarama, 1.61.1, 19",
    "librdkafka, 2.16.0, 19",
    "confluent-kafka-python, 2.16.1-rdkafka-2.16.0, 19",
    "'', '', 19",
  })
  void errorFitsTheSoftware(String name, String version, int error) {
    assertEquals(error, new Software(name, version).throttled().code());
  }

  @ParameterizedTest
  @CsvSource({
    // Clients that know the error, as long as the hold suffices.
    "apache-kafka-java, 4.0.0, 2000, 5000, true",
    "apache-kafka-java, 4.0.0, 5001, 5000, false",
    "kgo, v1.22.3, 2000, 5000, true",
    "kgo, v1.22.3, 3600000, 5000, false",
    "kafka-python, 3.0.12, 2000, 5000, false",
    // All others, whether the hold suffices or not.
    "apache-kafka-java, 2.6.3, 3600000, 5000, true",
    "sarama, 1.61.1, 3600000, 5000, true",
    "kafka-python, 2.0.2, 3600000, 5000, true",
    "'', '', 3600000, 5000, true",
  })
  void clientThatCountsErrorsIsHeld(
      String name, String version, long throttleMs, long leftMs, boolean held) {
    assertEquals(held, new Software(name, version).isHeldFor(throttleMs, leftMs));
  }

  @ParameterizedTest
  @CsvSource({
    "apache-kafka-java, 1, 30000, 15000",
    "apache-kafka-java, -1, 120000, 15000",
    "apache-kafka-java, -1, 1500, 750", // the console producer
    "kgo, -1, 10000, 5000",
    "'', 1, 0, 0",
    "'', 0, 1500, 15000", // awaits no answer
    "sarama, -1, 10000, 15000",
  })
  void holdIsShorterThanTheClientsTimeout(String name, short acks, int timeoutMs, long holdMs) {
    var request = new ProduceRequestData().setAcks(acks).setTimeoutMs(timeoutMs);
    assertEquals(holdMs, new Software(name, "4.0.0").holdMs(request));
  }
}
