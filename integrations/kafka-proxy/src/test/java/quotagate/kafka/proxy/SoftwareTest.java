// Each client gets an error that it retries.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertEquals;

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
    "librdkafka, 2.16.0, 19",
    "confluent-kafka-python, 2.16.1-rdkafka-2.16.0, 19",
    "'', '', 19",
  })
  void errorFitsTheSoftware(String name, String version, int error) {
    assertEquals(error, new Software(name, version).throttled().code());
  }
}
