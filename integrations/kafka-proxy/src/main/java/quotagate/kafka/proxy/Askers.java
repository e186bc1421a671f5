// The parts that all connections share: the two queues of asks, and the room for held requests.
package quotagate.kafka.proxy;

import io.kroxylicious.proxy.plugin.PluginConfigurationException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;

/**
 * @param decide for work that waits for its decision
 * @param account for work that is done and is only recorded. It has its own queue, because
 *     Quotagate refuses a whole batch if the key may not record, and no client waits for records.
 * @param holds the records that wait in memory
 */
record Askers(Asker decide, Asker account, Holds holds) implements AutoCloseable {
  private static final int HELD_SHARE = 4; // of the memory that this Java may have

  static Askers of(Settings settings) {
    String key = null;
    if (settings.keyFile() != null) {
      try {
        key = Files.readString(Path.of(settings.keyFile())).strip();
      } catch (IOException | RuntimeException e) {
        throw new PluginConfigurationException("keyFile: cannot be read: " + settings.keyFile(), e);
      }
    }
    var holds = new Holds(Runtime.getRuntime().maxMemory() / HELD_SHARE);
    return new Askers(new Asker(settings, key), new Asker(settings, key), holds);
  }

  @Override
  public void close() {
    decide.close();
    account.close();
  }
}
