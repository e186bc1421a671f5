// The filter's configuration, under `config` in Kroxylicious' file.
package quotagate.kafka.proxy;

import com.fasterxml.jackson.annotation.JsonCreator;
import com.fasterxml.jackson.annotation.JsonProperty;
import java.net.URI;
import org.jspecify.annotations.Nullable;

/**
 * The address of Quotagate, and the policy for when it does not answer.
 *
 * @param url the address of a node or of a load balancer, such as {@code http://quotagate:8080}
 * @param keyFile a file with an API key of scopes {@code decide} and {@code account}; null: without
 *     a key, which is enough for everything but consumer byte rates
 * @param timeoutMs how long a decision may take
 * @param onFailure the policy while Quotagate does not answer
 */
public record Settings(URI url, @Nullable String keyFile, int timeoutMs, OnFailure onFailure) {
  static final int DEFAULT_TIMEOUT_MS = 1_000;

  // A request may be held for 15 s and asked for once more, and the proxy gives up after 20 s.
  static final int MAX_TIMEOUT_MS = 4_000;

  /** The policy while Quotagate does not answer. */
  public enum OnFailure {
    /** Everything goes through, uncounted. */
    @JsonProperty("admit")
    ADMIT,
    /** Producing, fetching and changes of topics wait; clients try again after a second. */
    @JsonProperty("throttle")
    THROTTLE
  }

  @JsonCreator
  static Settings of(
      @JsonProperty(value = "url", required = true) URI url,
      @JsonProperty("keyFile") @Nullable String keyFile,
      @JsonProperty("timeoutMs") @Nullable Integer timeoutMs,
      @JsonProperty("onFailure") @Nullable OnFailure onFailure) {
    if (url == null || url.getHost() == null || !url.getScheme().matches("https?")) {
      throw new IllegalArgumentException("url: must be an http or https address, not " + url);
    }
    int within = timeoutMs == null ? DEFAULT_TIMEOUT_MS : timeoutMs;
    if (within < 1 || within > MAX_TIMEOUT_MS) {
      throw new IllegalArgumentException("timeoutMs: must be from 1 to " + MAX_TIMEOUT_MS);
    }
    return new Settings(url, keyFile, within, onFailure == null ? OnFailure.ADMIT : onFailure);
  }
}
