// Asks travel together, and every one of them is answered: by Quotagate, or in time by the policy.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.fasterxml.jackson.databind.ObjectMapper;
import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

class AskerTest {
  private static final int TIMEOUT_MS = 4_000;
  private static final Ask ASK = Ask.request(new Ask.Who("alice", "c"));
  private static final Ask BAD = Ask.request(new Ask.Who("bad", "c"));

  /** How the server answers a batch. */
  private interface Answer {
    void to(HttpExchange exchange, List<String> principals) throws IOException;
  }

  private final List<Integer> sizes = new CopyOnWriteArrayList<>();
  private final List<String> keys = new CopyOnWriteArrayList<>();
  private final ExecutorService threads = Executors.newCachedThreadPool();
  private volatile Answer answer = AskerTest::admitAll;
  private HttpServer server;
  private Asker asker;

  @BeforeEach
  void start() throws IOException {
    server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0);
    server.setExecutor(threads);
    server.createContext(
        "/v1/decisions:batch",
        exchange -> {
          var asks = new ObjectMapper().readTree(exchange.getRequestBody()).path("asks");
          List<String> principals = new ArrayList<>();
          asks.forEach(ask -> principals.add(ask.path("principal").asText()));
          sizes.add(principals.size());
          keys.add(String.valueOf(exchange.getRequestHeaders().getFirst("Authorization")));
          answer.to(exchange, principals);
        });
    server.start();
    asker = asker(Settings.OnFailure.ADMIT);
  }

  @AfterEach
  void stop() {
    asker.close();
    server.stop(0);
    threads.shutdownNow();
  }

  private Asker asker(Settings.OnFailure onFailure) {
    URI url = URI.create("http://127.0.0.1:" + server.getAddress().getPort() + "/");
    return new Asker(new Settings(url, null, TIMEOUT_MS, onFailure), "the-key");
  }

  private static void admitAll(HttpExchange exchange, List<String> principals) throws IOException {
    String one = "{\"decision\":\"delay\",\"throttle_ms\":7,\"applied\":1,\"limited_by\":null}";
    send(
        exchange,
        200,
        "{\"decisions\":[" + String.join(",", Collections.nCopies(principals.size(), one)) + "]}");
  }

  private static void send(HttpExchange exchange, int status, String body) throws IOException {
    byte[] bytes = body.getBytes(StandardCharsets.UTF_8);
    exchange.sendResponseHeaders(status, bytes.length);
    exchange.getResponseBody().write(bytes);
    exchange.close();
  }

  @Test
  void asksOfOneMomentTravelTogether() throws Exception {
    var go = new CountDownLatch(1);
    answer =
        (exchange, principals) -> {
          await(go);
          admitAll(exchange, principals);
        };
    List<CompletableFuture<Decision>> asked =
        IntStream.range(0, 102).mapToObj(each -> asker.ask(ASK)).toList();
    go.countDown();
    for (var each : asked) {
      assertEquals(Decision.Verdict.DELAY, each.get().verdict());
      assertEquals(7, each.get().throttleMs());
    }
    assertTrue(sizes.size() <= Asker.MAX_CALLS + 1, sizes.toString());
    assertEquals("Bearer the-key", keys.get(0));
  }

  @Test
  void connectionIsUsedAgain() throws Exception {
    Set<Integer> ports = ConcurrentHashMap.newKeySet();
    answer =
        (exchange, principals) -> {
          ports.add(exchange.getRemoteAddress().getPort());
          admitAll(exchange, principals);
        };
    for (int each = 0; each < 50; each++) {
      asker.ask(ASK).get();
    }
    assertTrue(ports.size() <= Asker.MAX_CALLS, ports.toString());
  }

  private static void await(CountDownLatch latch) {
    try {
      latch.await();
    } catch (InterruptedException e) {
      Thread.currentThread().interrupt();
    }
  }

  @Test
  void policyAnswersWhereNobodyListens() throws Exception {
    server.stop(0);
    assertEquals(Decision.ADMIT, asker.ask(ASK).get());
    try (Asker closed = asker(Settings.OnFailure.THROTTLE)) {
      assertEquals(Decision.WAIT, closed.ask(ASK).get());
    }
  }

  @Test
  void policyAnswersWhenNothingComesInTime() throws Exception {
    var never = new CountDownLatch(1);
    answer = (exchange, principals) -> await(never);
    List<CompletableFuture<Decision>> asked =
        IntStream.range(0, 5).mapToObj(each -> asker.ask(ASK)).toList();
    for (var each : asked) {
      assertEquals(Decision.ADMIT, each.get());
    }
    // From then on the policy answers at once, except for one ask that tries.
    assertTrue(asker.ask(ASK).isDone());
    never.countDown();
  }

  @Test
  void oneAskTriesWhetherItIsBack() throws Exception {
    answer = (exchange, principals) -> send(exchange, 500, "{}");
    assertEquals(Decision.ADMIT, asker.ask(ASK).get());
    answer = AskerTest::admitAll;
    Decision decision = asker.ask(ASK).get();
    while (decision.verdict() != Decision.Verdict.DELAY) {
      decision = asker.ask(ASK).get();
    }
    assertEquals(Decision.Verdict.DELAY, asker.ask(ASK).get().verdict());
  }

  @Test
  void badAskDoesNotFailTheOthers() throws Exception {
    var go = new CountDownLatch(1);
    answer =
        (exchange, principals) -> {
          await(go);
          if (principals.contains("bad")) {
            send(exchange, 422, "{}");
          } else {
            admitAll(exchange, principals);
          }
        };
    var before = List.of(asker.ask(ASK), asker.ask(ASK));
    List<CompletableFuture<Decision>> others =
        IntStream.range(0, 10).mapToObj(each -> asker.ask(ASK)).toList();
    CompletableFuture<Decision> bad = asker.ask(BAD);
    go.countDown();
    for (var each : before) {
      assertEquals(Decision.Verdict.DELAY, each.get().verdict());
    }
    for (var each : others) {
      assertEquals(Decision.Verdict.DELAY, each.get().verdict());
    }
    assertEquals(Decision.ADMIT, bad.get());
  }

  @Test
  void overloadIsNoOutage() throws Exception {
    answer =
        (exchange, principals) -> {
          exchange.getResponseHeaders().add("Retry-After", "3");
          send(exchange, 503, "{\"type\":\"urn:quotagate:overloaded\"}");
        };
    Decision decision = asker.ask(ASK).get();
    assertEquals(Decision.Verdict.THROTTLE, decision.verdict());
    assertEquals(3_000, decision.throttleMs());
  }
}
