// The plugin's configuration.
package quotagate.kafka.plugin;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.common.config.ConfigException;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class SettingsTest {
  @TempDir private Path folder;
  private final Map<String, Object> given = new HashMap<>();

  @BeforeEach
  void giveWhatIsRequired() throws IOException {
    Path key = Files.writeString(folder.resolve("key"), "secret\n");
    given.put(Settings.URL, "http://quotagate:8080/");
    given.put(Settings.KEY_FILE, key.toString());
    given.put("node.id", "1");
  }

  @Test
  void defaultsAreThoseOfTheReadme() {
    Settings settings = Settings.of(given);
    assertEquals(URI.create("http://quotagate:8080"), settings.url());
    assertEquals(500, settings.pollMs());
    assertEquals(2_000, settings.timeoutMs());
    assertEquals(1, settings.brokers());
    assertEquals(Set.of(), settings.excluded());
  }

  @Test
  void everySettingIsTaken() {
    given.put(Settings.POLL_MS, "1000");
    given.put(Settings.TIMEOUT_MS, " 300 ");
    given.put(Settings.BROKERS, "auto");
    given.put(Settings.EXCLUDED, "cruise-control; CN=topics,O=us;");
    Settings settings = Settings.of(given);
    assertEquals(1_000, settings.pollMs());
    assertEquals(300, settings.timeoutMs());
    assertNull(settings.brokers());
    assertEquals(Set.of("cruise-control", "CN=topics,O=us"), settings.excluded());
  }

  @ParameterizedTest
  @CsvSource({
    "url, ''",
    "url, quotagate:8080",
    "url, ftp://quotagate",
    "url, 'http://quota gate'",
    "key.file, /nowhere/key",
    "poll.interval.ms, 10",
    "poll.interval.ms, often",
    "timeout.ms, 0",
    "brokers, 0",
    "brokers, all",
    "polling, 500",
  })
  void wrongSettingIsNamed(String name, String value) {
    given.put(Settings.PREFIX + name, value);
    var refused = assertThrows(ConfigException.class, () -> Settings.of(given));
    assertTrue(refused.getMessage().contains(Settings.PREFIX + name), refused.getMessage());
  }
}
