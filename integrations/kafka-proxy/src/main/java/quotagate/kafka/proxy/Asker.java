// Asks Quotagate over HTTP: asks of one moment travel together, and a failure is answered by a
// policy.
package quotagate.kafka.proxy;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import io.micrometer.core.instrument.Metrics;
import java.io.IOException;
import java.net.ConnectException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.net.http.HttpTimeoutException;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Queue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.stream.Collectors;
import org.jspecify.annotations.Nullable;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * A queue of asks before Quotagate.
 *
 * <p>While {@link #MAX_CALLS} calls are under way, asks queue; they are sent when a call returns.
 * No timer adds latency. An ask is answered within the timeout: by Quotagate, or else by the
 * policy. After a failure the policy answers at once, and one ask every {@link #PROBE_MS} tries
 * whether Quotagate is back.
 */
final class Asker implements AutoCloseable {
  private static final Logger LOGGER = LoggerFactory.getLogger(Asker.class);
  private static final ObjectMapper JSON = new ObjectMapper();

  static final int MAX_CALLS = 2;
  static final int MAX_WAITING = 10_000;
  static final long PROBE_MS = 250;

  // Quotagate's own bounds of a batch are 1,000 asks, 10,000 ids and 1 MiB.
  private static final int MAX_BATCH = 500;
  private static final int MAX_BATCH_IDS = 5_000;
  private static final int MAX_BATCH_BYTES = 512 * 1024;
  private static final int MAX_WAITING_BYTES = 16 * 1024 * 1024;
  private static final long LOG_EVERY_MS = 10_000;
  private static final String OVERLOADED = "urn:quotagate:overloaded";

  private final URI batches;
  @Nullable private final String key;
  private final long timeoutNanos;
  private final Decision policy;
  private final ExecutorService threads;
  private final HttpClient http;

  // All below is guarded by this.
  private final Queue<Waiting> waiting = new ArrayDeque<>();
  private int waitingBytes;
  private int calls;
  private boolean failing;
  private long nextProbe;
  private long nextLog = System.nanoTime();

  private record Waiting(Ask ask, long deadline, CompletableFuture<Decision> answer) {}

  Asker(Settings settings, @Nullable String key) {
    this.batches =
        URI.create(settings.url().toString().replaceAll("/+$", "") + "/v1/decisions:batch");
    this.key = key;
    this.timeoutNanos = TimeUnit.MILLISECONDS.toNanos(settings.timeoutMs());
    this.policy = settings.onFailure() == Settings.OnFailure.ADMIT ? Decision.ADMIT : Decision.WAIT;
    this.threads =
        Executors.newFixedThreadPool(
            MAX_CALLS,
            task -> {
              var thread = new Thread(task, "quotagate-asker");
              thread.setDaemon(true);
              return thread;
            });
    // A connection that is closed just when it is used again would be a failure; a stopping node
    // keeps idle connections for QUOTAGATE_DRAIN_MS (2 s).
    if (System.getProperty("jdk.httpclient.keepalive.timeout") == null) {
      System.setProperty("jdk.httpclient.keepalive.timeout", "1");
    }
    this.http =
        HttpClient.newBuilder()
            .version(HttpClient.Version.HTTP_1_1)
            .connectTimeout(Duration.ofNanos(timeoutNanos))
            .executor(threads)
            .build();
  }

  /** The decision on an ask. It completes on any thread, and never with an exception. */
  CompletableFuture<Decision> ask(Ask ask) {
    long now = System.nanoTime();
    var answer = new CompletableFuture<Decision>();
    synchronized (this) {
      if (failing) {
        if (now - nextProbe < 0) {
          return counted(policy, "failure");
        }
        nextProbe = now + TimeUnit.MILLISECONDS.toNanos(PROBE_MS);
      }
      if (waiting.size() >= MAX_WAITING || waitingBytes + ask.bytes() > MAX_WAITING_BYTES) {
        // Too much to do is no outage: a limiter that admits because it is flooded is switched off
        // by the flood.
        return counted(Decision.WAIT, "queue");
      }
      waiting.add(new Waiting(ask, now + timeoutNanos, answer));
      waitingBytes += ask.bytes();
    }
    send();
    return answer;
  }

  private static CompletableFuture<Decision> counted(Decision decision, String source) {
    count(decision, source);
    return CompletableFuture.completedFuture(decision);
  }

  private static void count(Decision decision, String source) {
    String verdict = decision.verdict().name().toLowerCase(Locale.ROOT);
    Metrics.counter("quotagate_proxy_decisions", "decision", verdict, "source", source).increment();
  }

  /** Send the waiting asks, as far as calls are free. */
  private void send() {
    for (List<Waiting> batch = take(); !batch.isEmpty(); batch = take()) {
      call(batch)
          .whenComplete(
              (ignored, failure) -> {
                synchronized (this) {
                  calls--;
                }
                send();
              });
    }
  }

  private synchronized List<Waiting> take() {
    List<Waiting> batch = new ArrayList<>();
    if (calls >= MAX_CALLS) {
      return batch;
    }
    int bytes = 0;
    int ids = 0;
    while (!waiting.isEmpty() && batch.size() < MAX_BATCH) {
      Ask next = waiting.peek().ask();
      bytes += next.bytes();
      ids += next.ids();
      if (!batch.isEmpty() && (bytes > MAX_BATCH_BYTES || ids > MAX_BATCH_IDS)) {
        break;
      }
      waitingBytes -= next.bytes();
      batch.add(waiting.remove());
    }
    if (!batch.isEmpty()) {
      calls++;
    }
    return batch;
  }

  /** Answer a batch; the stage completes when all of it is answered. */
  private CompletableFuture<Void> call(List<Waiting> batch) {
    return post(batch, true)
        .handle(
            (response, failure) -> {
              if (failure != null) {
                fail(batch, failure instanceof CompletionException ? failure.getCause() : failure);
                return CompletableFuture.<Void>completedFuture(null);
              }
              return answer(batch, response);
            })
        .thenCompose(answered -> answered)
        .exceptionally(
            failure -> {
              fail(batch, failure);
              return null;
            });
  }

  private CompletableFuture<HttpResponse<byte[]>> post(List<Waiting> batch, boolean mayRetry) {
    long left = batch.get(0).deadline() - System.nanoTime();
    if (left <= 0) {
      return CompletableFuture.failedFuture(new TimeoutException("it waited for the calls before"));
    }
    HttpRequest.Builder request =
        HttpRequest.newBuilder(batches)
            .timeout(Duration.ofNanos(left))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body(batch)));
    if (key != null) {
      request.header("Authorization", "Bearer " + key);
    }
    CompletableFuture<HttpResponse<byte[]>> sent =
        http.sendAsync(request.build(), HttpResponse.BodyHandlers.ofByteArray());
    // The request's own timeout ends with the head of the response; this one covers the body, too.
    CompletableFuture<HttpResponse<byte[]>> bounded =
        sent.copy().orTimeout(left, TimeUnit.NANOSECONDS);
    return bounded
        .handle(
            (response, failure) -> {
              if (failure == null) {
                return CompletableFuture.completedFuture(response);
              }
              sent.cancel(true);
              Throwable cause =
                  failure instanceof CompletionException ? failure.getCause() : failure;
              boolean broken =
                  cause instanceof IOException
                      && !(cause instanceof ConnectException)
                      && !(cause instanceof HttpTimeoutException);
              // A node that restarts breaks idle connections. The call is sent once more, and may
              // be counted twice.
              return mayRetry && broken
                  ? post(batch, false)
                  : CompletableFuture.<HttpResponse<byte[]>>failedFuture(cause);
            })
        .thenCompose(found -> found);
  }

  private static String body(List<Waiting> batch) {
    return batch.stream()
        .map(each -> each.ask().json())
        .collect(Collectors.joining(",", "{\"asks\":[", "]}"));
  }

  private CompletableFuture<Void> answer(List<Waiting> batch, HttpResponse<byte[]> response) {
    int status = response.statusCode();
    if (status == 422 && batch.size() > 1) {
      // One ask that Quotagate does not understand fails its batch: find it.
      int half = batch.size() / 2;
      return CompletableFuture.allOf(
          call(batch.subList(0, half)), call(batch.subList(half, batch.size())));
    }
    try {
      JsonNode body = JSON.readTree(response.body());
      if (status == 200) {
        JsonNode decisions = body.path("decisions");
        if (decisions.size() != batch.size()) {
          throw new IOException(decisions.size() + " decisions on " + batch.size() + " asks");
        }
        synchronized (this) {
          if (failing) {
            LOGGER.info("Quotagate answers again");
          }
          failing = false;
        }
        for (int at = 0; at < batch.size(); at++) {
          complete(batch.get(at), Decision.of(decisions.get(at)), "quotagate");
        }
      } else if (status == 422) {
        // The proxy's own fault, and of this ask alone.
        LOGGER.error("Quotagate does not understand {}: {}", batch.get(0).ask().json(), body);
        complete(batch.get(0), policy, "failure");
      } else if (status == 503 && body.path("type").asText().equals(OVERLOADED)) {
        int seconds = Integer.parseInt(response.headers().firstValue("Retry-After").orElse("1"));
        for (Waiting each : batch) {
          complete(each, Decision.of(Decision.Verdict.THROTTLE, seconds * 1_000), "overload");
        }
      } else {
        throw new IOException(
            status + " " + body.path("title").asText() + " " + body.path("detail").asText());
      }
    } catch (IOException | RuntimeException e) {
      fail(batch, e);
    }
    return CompletableFuture.completedFuture(null);
  }

  private void fail(List<Waiting> batch, Throwable failure) {
    List<Waiting> failed = new ArrayList<>(batch);
    long now = System.nanoTime();
    boolean said;
    synchronized (this) {
      failing = true;
      nextProbe = now + TimeUnit.MILLISECONDS.toNanos(PROBE_MS);
      failed.addAll(waiting);
      waiting.clear();
      waitingBytes = 0;
      said = now - nextLog < 0;
      if (!said) {
        nextLog = now + TimeUnit.MILLISECONDS.toNanos(LOG_EVERY_MS);
      }
    }
    if (!said) {
      LOGGER.warn("Quotagate gave no decision, so the policy answers: {}", failure.toString());
    }
    for (Waiting each : failed) {
      complete(each, policy, "failure");
    }
  }

  private static void complete(Waiting waiting, Decision decision, String source) {
    if (waiting.answer().complete(decision)) {
      count(decision, source);
    }
  }

  @Override
  public void close() {
    threads.shutdownNow();
  }
}
