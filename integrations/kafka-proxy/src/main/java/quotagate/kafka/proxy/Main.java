// Starts a Kroxylicious proxy from its own configuration file: `java -jar proxy.jar CONFIG.yaml`.
package quotagate.kafka.proxy;

import io.kroxylicious.proxy.KafkaProxy;
import io.kroxylicious.proxy.config.ConfigParser;
import io.kroxylicious.proxy.internal.config.Features;
import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;

/** The program. It prints {@code ready} when clients can connect, and ends on Ctrl-C or SIGTERM. */
public final class Main {
  private Main() {}

  public static void main(String[] arguments) throws IOException {
    if (arguments.length != 1) {
      System.err.println("usage: java -jar proxy.jar CONFIG.yaml");
      System.exit(2);
    }
    var parser = new ConfigParser();
    KafkaProxy proxy;
    try (InputStream configuration = Files.newInputStream(Path.of(arguments[0]))) {
      proxy =
          new KafkaProxy(
              parser, parser.parseConfiguration(configuration), Features.defaultFeatures());
    }
    proxy.startup();
    Runtime.getRuntime().addShutdownHook(new Thread(proxy::shutdown, "shutdown"));
    System.out.println("ready");
    System.out.flush();
    proxy.block();
  }
}
