// Plays a node of Quotagate, which tests make fail.
package quotagate.kafka.plugin;

import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/** Lists entities in pages of two, by ETag, and shows a throttle factor. */
final class Node implements AutoCloseable {
  private static final int PAGE = 2;

  /** The requests: path, query, and the known ETag, such as {@code /health/ready}. */
  final List<String> asked = new CopyOnWriteArrayList<>();

  private final HttpServer server;
  private final ExecutorService threads = Executors.newCachedThreadPool();
  private List<String> listed = List.of();
  private int version;
  private int status = 200;
  private String factor = "1.0";
  private String key = "secret";
  private boolean garbled;
  private boolean changing;

  Node(int port) throws IOException {
    server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), port), 0);
    server.setExecutor(threads);
    server.createContext("/", this::answer);
    server.start();
  }

  int port() {
    return server.getAddress().getPort();
  }

  /**
   * Replace the quotas; {@code 'user=alice': 'producer_byte_rate', 100} as three arguments each.
   */
  synchronized void list(Object... triples) {
    List<String> entities = new ArrayList<>();
    for (int at = 0; at < triples.length; at += 3) {
      entities.add(
          "{\"entity\":\"%s\",\"quotas\":{\"%s\":{\"limit\":%s}},\"bounds\":{},\"version\":1}"
              .formatted(triples[at], triples[at + 1], triples[at + 2]));
    }
    listed = entities;
    version++;
  }

  synchronized void factor(String now) {
    factor = now;
  }

  synchronized void status(int now) {
    status = now;
  }

  synchronized void key(String now) {
    key = now;
  }

  synchronized void garbled(boolean now) {
    garbled = now;
  }

  /** Let the catalog change between two pages. */
  synchronized void changing(boolean now) {
    changing = now;
  }

  private synchronized void answer(HttpExchange exchange) throws IOException {
    String path = exchange.getRequestURI().toString();
    String known = exchange.getRequestHeaders().getFirst("If-None-Match");
    asked.add(path + (known == null ? "" : " " + known));
    boolean allowed =
        ("Bearer " + key).equals(exchange.getRequestHeaders().getFirst("Authorization"));
    if (status != 200 || !allowed) {
      send(exchange, allowed ? status : 401, "{}");
    } else if (garbled) {
      send(exchange, 200, "{\"quotas\": ");
    } else if (path.equals("/health/ready")) {
      send(exchange, 200, "{\"status\":\"ready\",\"throttle_factor\":" + factor + "}");
    } else {
      list(exchange, path, known);
    }
  }

  private void list(HttpExchange exchange, String path, String known) throws IOException {
    String tag = "\"" + version + "\"";
    exchange.getResponseHeaders().set("ETag", tag);
    if (tag.equals(known)) {
      send(exchange, 304, "");
      return;
    }
    int after = path.contains("cursor=") ? Integer.parseInt(path.replaceAll(".*cursor=", "")) : 0;
    int end = Math.min(listed.size(), after + PAGE);
    String next = end < listed.size() ? "\"" + end + "\"" : "null";
    String page = String.join(",", listed.subList(after, end));
    if (changing) {
      version++;
    }
    send(exchange, 200, "{\"quotas\":[" + page + "],\"next_cursor\":" + next + "}");
  }

  private static void send(HttpExchange exchange, int status, String body) throws IOException {
    byte[] bytes = body.getBytes(StandardCharsets.UTF_8);
    exchange.sendResponseHeaders(status, bytes.length == 0 ? -1 : bytes.length);
    exchange.getResponseBody().write(bytes);
    exchange.close();
  }

  @Override
  public void close() {
    server.stop(0);
    threads.shutdownNow();
  }
}
