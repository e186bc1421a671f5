// The plugin's configuration, from the broker's own file.
package quotagate.kafka.plugin;

import java.net.URI;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.stream.Collectors;
import org.apache.kafka.common.config.ConfigException;
import org.jspecify.annotations.Nullable;

/**
 * The address of Quotagate, and how its limits are taken.
 *
 * @param url the address of a node, or of a load balancer
 * @param keyFile a file with an API key of scope {@code read}
 * @param pollMs the time between two polls
 * @param timeoutMs how long an answer may take
 * @param brokers the number by which limits are divided; null: the number of live brokers
 * @param excluded the principals to which no throttle factor applies
 */
record Settings(
    URI url,
    Path keyFile,
    int pollMs,
    int timeoutMs,
    @Nullable Integer brokers,
    Set<String> excluded) {
  static final String PREFIX = "client.quota.callback.quotagate.";
  static final String URL = PREFIX + "url";
  static final String KEY_FILE = PREFIX + "key.file";
  static final String POLL_MS = PREFIX + "poll.interval.ms";
  static final String TIMEOUT_MS = PREFIX + "timeout.ms";
  static final String BROKERS = PREFIX + "brokers";
  static final String EXCLUDED = PREFIX + "excluded.principals";

  private static final Set<String> NAMES =
      Set.of(URL, KEY_FILE, POLL_MS, TIMEOUT_MS, BROKERS, EXCLUDED);
  private static final int MAX_BROKERS = 100_000;

  /**
   * Read the settings.
   *
   * @throws ConfigException if a setting is wrong, so that the broker does not start
   */
  static Settings of(Map<String, ?> configs) {
    Set<String> unknown =
        configs.keySet().stream()
            .filter(name -> name.startsWith(PREFIX) && !NAMES.contains(name))
            .collect(Collectors.toCollection(TreeSet::new));
    if (!unknown.isEmpty()) {
      throw new ConfigException("unknown settings: " + unknown + "; there are " + NAMES);
    }
    String brokers = text(configs, BROKERS, "1");
    return new Settings(
        url(configs),
        keyFile(configs),
        number(POLL_MS, text(configs, POLL_MS, "500"), 50, 60_000),
        number(TIMEOUT_MS, text(configs, TIMEOUT_MS, "2000"), 1, 60_000),
        brokers.equals("auto") ? null : number(BROKERS, brokers, 1, MAX_BROKERS),
        Arrays.stream(text(configs, EXCLUDED, "").split(";", -1))
            .map(String::strip)
            .filter(name -> !name.isEmpty())
            .collect(Collectors.toUnmodifiableSet()));
  }

  private static URI url(Map<String, ?> configs) {
    String given = text(configs, URL, "");
    try {
      URI url = URI.create(given.replaceAll("/+$", ""));
      if (url.getHost() != null && url.getScheme().matches("https?")) {
        return url;
      }
    } catch (IllegalArgumentException e) {
      // said below
    }
    throw new ConfigException(URL, given, "must be an http or https address");
  }

  private static Path keyFile(Map<String, ?> configs) {
    String given = text(configs, KEY_FILE, "");
    if (given.isEmpty() || !Files.isReadable(Path.of(given))) {
      throw new ConfigException(KEY_FILE, given, "must be a file that can be read");
    }
    return Path.of(given);
  }

  private static int number(String name, String given, int least, int most) {
    try {
      int number = Integer.parseInt(given);
      if (number >= least && number <= most) {
        return number;
      }
    } catch (NumberFormatException e) {
      // said below
    }
    throw new ConfigException(name, given, "must be a whole number from " + least + " to " + most);
  }

  private static String text(Map<String, ?> configs, String name, String otherwise) {
    Object given = configs.get(name);
    return given == null ? otherwise : given.toString().strip();
  }
}
