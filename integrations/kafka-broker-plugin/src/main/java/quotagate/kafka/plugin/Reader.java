// Reads quotas and the throttle factor from Quotagate over HTTP.
package quotagate.kafka.plugin;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.net.ConnectException;
import java.net.URI;
import java.net.URLEncoder;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.jspecify.annotations.Nullable;

/** One reader, for one thread. It keeps the ETag of the quotas that it read last. */
final class Reader implements AutoCloseable {
  // Quotagate's largest page.
  private static final int PAGE = 1_000;
  private static final ObjectMapper JSON = new ObjectMapper();

  private final Settings settings;
  private final ExecutorService threads;
  private final HttpClient http;
  @Nullable private String etag;

  // A node that comes up again may have another catalog, at the same version.
  private boolean readAgain;

  Reader(Settings settings) {
    this.settings = settings;
    this.threads =
        Executors.newCachedThreadPool(
            task -> {
              var thread = new Thread(task, "quotagate-http");
              thread.setDaemon(true);
              return thread;
            });
    this.http =
        HttpClient.newBuilder()
            .version(HttpClient.Version.HTTP_1_1)
            .connectTimeout(Duration.ofMillis(settings.timeoutMs()))
            .executor(threads)
            .build();
  }

  /**
   * The quotas, if they changed since they were read last; else null.
   *
   * @throws IOException if Quotagate gave no usable answer
   */
  @Nullable Quotas quotas() throws IOException, InterruptedException {
    // An unchanged catalog costs one entity.
    if (etag != null && !readAgain && get("/v1/quotas?limit=1", etag).statusCode() == 304) {
      return null;
    }
    var found = new Quotas.Builder();
    String version = null;
    boolean changing = false;
    String cursor = null;
    do {
      String after = cursor == null ? "" : "&cursor=" + encoded(cursor);
      HttpResponse<byte[]> page = get("/v1/quotas?limit=" + PAGE + after, null);
      JsonNode body = JSON.readTree(page.body());
      JsonNode listed = body.path("quotas");
      if (!listed.isArray()) {
        throw new IOException("not a list of quotas");
      }
      for (JsonNode each : listed) {
        found.add(each);
      }
      String tag = page.headers().firstValue("ETag").orElse("");
      changing |= version != null && !version.equals(tag);
      version = tag;
      cursor = body.path("next_cursor").isTextual() ? body.path("next_cursor").asText() : null;
    } while (cursor != null);
    // Pages of several versions are each true; they are read again next time.
    etag = changing || version.isEmpty() ? null : version;
    readAgain = false;
    return found.build();
  }

  /** The ETag of the quotas that were read last; null if it is not known. */
  @Nullable String etag() {
    return etag;
  }

  /**
   * The throttle factor in force.
   *
   * @throws IOException if Quotagate gave no usable answer
   */
  double factor() throws IOException, InterruptedException {
    JsonNode factor = JSON.readTree(get("/health/ready", null).body()).path("throttle_factor");
    if (!factor.isNumber() || !(factor.asDouble() >= 0 && factor.asDouble() <= 1)) {
      throw new IOException("not a throttle factor: " + factor);
    }
    return factor.asDouble();
  }

  private HttpResponse<byte[]> get(String path, @Nullable String known)
      throws IOException, InterruptedException {
    HttpRequest.Builder request =
        HttpRequest.newBuilder(URI.create(settings.url() + path))
            .timeout(Duration.ofMillis(settings.timeoutMs()))
            .header("Authorization", "Bearer " + key());
    if (known != null) {
      request.header("If-None-Match", known);
    }
    HttpResponse<byte[]> response = sent(request.build());
    int status = response.statusCode();
    if (status != 200 && !(status == 304 && known != null)) {
      throw new IOException(path + " was answered with " + status);
    }
    return response;
  }

  /** The key, read each time, so that it can be replaced while the broker runs. */
  private String key() throws IOException {
    String key = Files.readString(settings.keyFile()).strip();
    if (key.isEmpty() || !key.chars().allMatch(each -> each > ' ' && each <= '~')) {
      throw new IOException("no key in " + settings.keyFile()); // and it is not shown
    }
    return key;
  }

  private HttpResponse<byte[]> sent(HttpRequest request) throws IOException, InterruptedException {
    CompletableFuture<HttpResponse<byte[]>> sent =
        http.sendAsync(request, HttpResponse.BodyHandlers.ofByteArray());
    try {
      // The request's own timeout ends with the head of the response; this one covers the body.
      return sent.get(settings.timeoutMs(), TimeUnit.MILLISECONDS);
    } catch (TimeoutException e) {
      throw new IOException("no answer within " + settings.timeoutMs() + " ms", e);
    } catch (ExecutionException e) {
      readAgain |= e.getCause() instanceof ConnectException;
      throw new IOException(e.getCause());
    } finally {
      sent.cancel(true);
    }
  }

  private static String encoded(String text) {
    return URLEncoder.encode(text, StandardCharsets.UTF_8);
  }

  @Override
  public void close() {
    threads.shutdownNow();
  }
}
