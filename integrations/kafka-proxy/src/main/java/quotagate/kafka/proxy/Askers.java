// The two queues of asks that all connections share.
package quotagate.kafka.proxy;

import io.kroxylicious.proxy.plugin.PluginConfigurationException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;

/**
 * @param decide for work that waits for its decision
 * @param account for work that is done and is only recorded. It has a queue of its own, for
 *     Quotagate refuses a whole batch when the key may not record, and nobody waits for it.
 */
record Askers(Asker decide, Asker account) implements AutoCloseable {
  static Askers of(Settings settings) {
    String key = null;
    if (settings.keyFile() != null) {
      try {
        key = Files.readString(Path.of(settings.keyFile())).strip();
      } catch (IOException | RuntimeException e) {
        throw new PluginConfigurationException("keyFile: cannot be read: " + settings.keyFile(), e);
      }
    }
    return new Askers(new Asker(settings, key), new Asker(settings, key));
  }

  @Override
  public void close() {
    decide.close();
    account.close();
  }
}
