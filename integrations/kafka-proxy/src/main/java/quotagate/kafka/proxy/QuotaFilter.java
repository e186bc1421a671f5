// One connection of a client: asks before its work is done, lets it wait, and says how long.
package quotagate.kafka.proxy;

import io.kroxylicious.proxy.filter.FilterContext;
import io.kroxylicious.proxy.filter.FilterDispatchExecutor;
import io.kroxylicious.proxy.filter.RequestFilter;
import io.kroxylicious.proxy.filter.RequestFilterResult;
import io.kroxylicious.proxy.filter.ResponseFilter;
import io.kroxylicious.proxy.filter.ResponseFilterResult;
import java.util.EnumMap;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.common.message.ApiVersionsRequestData;
import org.apache.kafka.common.message.ApiVersionsResponseData;
import org.apache.kafka.common.message.ApiVersionsResponseData.ApiVersion;
import org.apache.kafka.common.message.FetchRequestData;
import org.apache.kafka.common.message.MetadataResponseData;
import org.apache.kafka.common.message.ProduceRequestData;
import org.apache.kafka.common.message.RequestHeaderData;
import org.apache.kafka.common.message.ResponseHeaderData;
import org.apache.kafka.common.message.SaslAuthenticateRequestData;
import org.apache.kafka.common.message.SaslAuthenticateResponseData;
import org.apache.kafka.common.message.SaslHandshakeRequestData;
import org.apache.kafka.common.message.SaslHandshakeResponseData;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.Errors;
import org.jspecify.annotations.Nullable;

/**
 * The filter. The proxy calls it for one request after the other, in their order, and always from
 * the thread of the connection; so what is asked for in another thread comes back by that executor.
 *
 * <p>A throttled client learns at once, by {@code throttle_time_ms}. As in a broker, its connection
 * then pauses: whoever sends on regardless waits in the proxy, for {@link #LONGEST_HOLD_MS} at
 * most.
 */
final class QuotaFilter implements RequestFilter, ResponseFilter {
  /**
   * The longest time that a request is held. The proxy closes a connection when its filter takes 20
   * s.
   */
  static final long LONGEST_HOLD_MS = 15_000;

  // What a producer had sent before it learnt of its throttle time is seen a moment later, and is
  // not held. Others have one request under way.
  private static final long QUEUED_MS = 250;

  // How often a held request is asked for again whose client hears of no throttle time: a wait may
  // end early, as when a disk has room again.
  private static final long ASK_AGAIN_MS = 1_000;
  private static final short METADATA_VERSION = 12; // the first with topic ids without names
  private static final short FIRST_TOLD_PRODUCE =
      6; // KIP-219: from then on clients pause by themselves

  /** What pauses apart: a producer that has to wait may still fetch. */
  private enum Kind {
    PRODUCE,
    FETCH,
    MUTATION,
    ANY
  }

  /** What is to be done with the response to a forwarded request. */
  private record Expected(
      Kind kind, Ask.Who who, boolean counted, CompletionStage<Decision> late) {}

  private final Askers askers;
  private final FilterDispatchExecutor executor;
  private final Sasl sasl = new Sasl();
  private final Batches batches = new Batches();
  private final Map<Integer, Expected> expected = new HashMap<>();
  private final Map<Kind, Long> pausedUntil = new EnumMap<>(Kind.class);
  private Software software = Software.UNKNOWN;
  private long queuedUntil = Long.MIN_VALUE;
  private short metadataVersion = METADATA_VERSION;

  QuotaFilter(Askers askers, FilterDispatchExecutor executor) {
    this.askers = askers;
    this.executor = executor;
  }

  @Override
  public CompletionStage<RequestFilterResult> onRequest(
      ApiKeys kind, RequestHeaderData header, ApiMessage request, FilterContext context) {
    return switch (kind) {
      case API_VERSIONS -> {
        var versions = (ApiVersionsRequestData) request;
        if (header.requestApiVersion() >= 3) {
          software = new Software(versions.clientSoftwareName(), versions.clientSoftwareVersion());
        }
        yield context.forwardRequest(header, request);
      }
      case SASL_HANDSHAKE -> handshake(header, (SaslHandshakeRequestData) request, context);
      case SASL_AUTHENTICATE ->
          authenticate(header, (SaslAuthenticateRequestData) request, context);
      case PRODUCE -> new Producing(header, (ProduceRequestData) request, context).begin();
      case FETCH -> new Fetching(header, (FetchRequestData) request, context).begin();
      case CREATE_TOPICS, DELETE_TOPICS, CREATE_PARTITIONS ->
          new Mutating(kind, header, request, context).begin();
      default -> new Other(kind, header, request, context).begin();
    };
  }

  @Override
  public CompletionStage<ResponseFilterResult> onResponse(
      ApiKeys kind, ResponseHeaderData header, ApiMessage response, FilterContext context) {
    if (response instanceof SaslHandshakeResponseData handshake) {
      handshake.mechanisms().retainAll(Sasl.MECHANISMS);
    } else if (response instanceof SaslAuthenticateResponseData authentication) {
      if (authentication.errorCode() == Errors.NONE.code()) {
        sasl.accepted();
      }
    } else if (response instanceof ApiVersionsResponseData versions) {
      ApiVersion metadata = versions.apiKeys().find(ApiKeys.METADATA.id);
      if (metadata != null) {
        metadataVersion = (short) Math.min(METADATA_VERSION, metadata.maxVersion());
      }
    }
    Expected found = expected.remove(header.correlationId());
    if (found == null) {
      return context.forwardResponse(header, response);
    }
    if (found.kind() == Kind.FETCH && found.counted()) {
      long bytes = Fetch.bytes(response);
      if (bytes > 0) {
        // Done already, so nobody waits for this answer; the next fetch is asked for after it.
        askers.account().ask(Ask.fetched(found.who(), bytes));
      }
    }
    return found
        .late()
        .thenCompose(
            decision -> {
              ThrottleTimes.raise(response, leftMs(found.kind()));
              return context.forwardResponse(header, response);
            });
  }

  private CompletionStage<RequestFilterResult> handshake(
      RequestHeaderData header, SaslHandshakeRequestData request, FilterContext context) {
    // After version 0 the tokens come without any frame, so that no name could be read from them.
    if (header.requestApiVersion() >= 1 && sasl.begin(request.mechanism())) {
      return context.forwardRequest(header, request);
    }
    return context
        .requestFilterResultBuilder()
        .shortCircuitResponse(
            new SaslHandshakeResponseData()
                .setErrorCode(Errors.UNSUPPORTED_SASL_MECHANISM.code())
                .setMechanisms(Sasl.MECHANISMS))
        .completed();
  }

  private CompletionStage<RequestFilterResult> authenticate(
      RequestHeaderData header, SaslAuthenticateRequestData request, FilterContext context) {
    if (sasl.sent(request.authBytes())) {
      return context.forwardRequest(header, request);
    }
    return context
        .requestFilterResultBuilder()
        .shortCircuitResponse(
            new SaslAuthenticateResponseData()
                .setErrorCode(Errors.SASL_AUTHENTICATION_FAILED.code())
                .setErrorMessage("Quotagate cannot tell whose these credentials are"))
        .withCloseConnection()
        .completed();
  }

  private static long nowMs() {
    return TimeUnit.NANOSECONDS.toMillis(System.nanoTime());
  }

  /** How much longer this kind of work pauses. */
  private long leftMs(Kind kind) {
    long now = nowMs();
    long until =
        Math.max(pausedUntil.getOrDefault(kind, now), pausedUntil.getOrDefault(Kind.ANY, now));
    return Math.max(0, until - now);
  }

  /** Pause by a decision. */
  private void pause(Kind kind, Decision decision) {
    if (decision.throttleMs() > 0) {
      Kind paused = decision.limitsRequests() ? Kind.ANY : kind;
      pausedUntil.merge(paused, nowMs() + decision.throttleMs(), Math::max);
    }
  }

  /** One request, from when it comes to when it is forwarded or answered. */
  private abstract class Work<R extends ApiMessage> {
    final Kind kind;
    final RequestHeaderData header;
    final R request;
    final FilterContext context;
    final Ask.Who who;
    private final long until = nowMs() + LONGEST_HOLD_MS;

    Work(Kind kind, RequestHeaderData header, R request, FilterContext context) {
      this.kind = kind;
      this.header = header;
      this.request = request;
      this.context = context;
      // A broker reads a missing client-id as an empty one.
      String clientId = header.clientId() == null ? "" : header.clientId();
      this.who = new Ask.Who(sasl.principal(), clientId);
    }

    abstract CompletionStage<Decision> ask();

    /** Whether the client waits by itself when it gets a throttle time; others are held. */
    abstract boolean canBeTold();

    /** The answer to a request that has to wait; null closes the connection. */
    @Nullable
    abstract ApiMessage throttled(int throttleMs);

    /** The answer to a request that is never admitted; null closes the connection. */
    @Nullable
    abstract ApiMessage rejected();

    CompletionStage<RequestFilterResult> forward(Decision decision) {
      return forwarded(decision.counted(), CompletableFuture.completedFuture(decision));
    }

    final CompletionStage<RequestFilterResult> forwarded(
        boolean counted, CompletionStage<Decision> late) {
      expected.put(header.correlationId(), new Expected(kind, who, counted, late));
      return context.forwardRequest(header, request);
    }

    CompletionStage<RequestFilterResult> begin() {
      long left = leftMs(kind);
      long now = nowMs();
      if (left == 0) {
        return ask().thenComposeAsync(this::decided, executor);
      }
      boolean queued = kind == Kind.PRODUCE && canBeTold() && now < queuedUntil;
      long hold = queued ? 0 : Math.min(left, until - now);
      if (hold > 0) {
        return later(hold).thenComposeAsync(ignored -> begin(), executor);
      }
      if (!queued) {
        expectQueued();
      }
      return overdue(left);
    }

    /** It was held for as long as possible. */
    CompletionStage<RequestFilterResult> overdue(long leftMs) {
      return answer(throttled((int) Math.min(leftMs, Integer.MAX_VALUE)));
    }

    private CompletionStage<RequestFilterResult> decided(Decision decision) {
      if (decision.verdict() == Decision.Verdict.THROTTLE && !canBeTold() && nowMs() < until) {
        long hold = Math.min(Math.min(decision.throttleMs(), ASK_AGAIN_MS), until - nowMs());
        return later(Math.max(1, hold))
            .thenComposeAsync(ignored -> ask(), executor)
            .thenComposeAsync(this::decided, executor);
      }
      pause(kind, decision);
      return switch (decision.verdict()) {
        case ADMIT, DELAY -> forward(decision);
        case THROTTLE -> {
          expectQueued();
          yield answer(throttled(decision.throttleMs()));
        }
        case REJECT -> answer(rejected());
      };
    }

    private void expectQueued() {
      if (kind == Kind.PRODUCE) {
        queuedUntil = nowMs() + QUEUED_MS;
      }
    }

    final CompletionStage<RequestFilterResult> answer(@Nullable ApiMessage response) {
      return response == null
          ? context.requestFilterResultBuilder().withCloseConnection().completed()
          : context.requestFilterResultBuilder().shortCircuitResponse(response).completed();
    }

    private CompletionStage<Void> later(long ms) {
      var over = new CompletableFuture<Void>();
      executor.schedule(() -> over.complete(null), ms, TimeUnit.MILLISECONDS);
      return over;
    }
  }

  /** Decided before the append, by the bytes and the producer ids of the records. */
  private final class Producing extends Work<ProduceRequestData> {
    private final Produce produce;

    Producing(RequestHeaderData header, ProduceRequestData request, FilterContext context) {
      super(Kind.PRODUCE, header, request, context);
      produce = Produce.of(request);
    }

    @Override
    CompletionStage<RequestFilterResult> begin() {
      if (isAnswered() && batches.follow(produce.batches(), System.nanoTime())) {
        return answer(throttled((int) Math.min(leftMs(kind), Integer.MAX_VALUE)));
      }
      if (produce.ids().size() > Ask.MAX_IDS) {
        return answer(rejected());
      }
      return super.begin();
    }

    @Override
    CompletionStage<Decision> ask() {
      return askers.decide().ask(Ask.produce(who, produce.bytes(), produce.ids()));
    }

    @Override
    boolean canBeTold() {
      return isAnswered() && header.requestApiVersion() >= FIRST_TOLD_PRODUCE;
    }

    @Override
    CompletionStage<RequestFilterResult> forward(Decision decision) {
      batches.admit(produce.batches());
      return isAnswered() ? super.forward(decision) : context.forwardRequest(header, request);
    }

    @Nullable
    @Override
    ApiMessage throttled(int throttleMs) {
      batches.refuse(produce.batches(), System.nanoTime());
      return refused(software.throttled(), "The quota is used up", throttleMs);
    }

    @Nullable
    @Override
    ApiMessage rejected() {
      return refused(Errors.POLICY_VIOLATION, "No quota would ever admit this", 0);
    }

    @Nullable
    private ApiMessage refused(Errors error, String message, int throttleMs) {
      return isAnswered() ? Produce.refused(request, error, message, throttleMs) : null;
    }

    /**
     * With acks=0 a client hears of nothing, and a broker that finds an error closes the
     * connection.
     */
    private boolean isAnswered() {
      return request.acks() != 0;
    }
  }

  /** Asked for before, with no more than may be fetched now, and recorded after. */
  private final class Fetching extends Work<FetchRequestData> {
    Fetching(RequestHeaderData header, FetchRequestData request, FilterContext context) {
      super(Kind.FETCH, header, request, context);
    }

    @Override
    CompletionStage<Decision> ask() {
      CompletionStage<Decision> one = askers.decide().ask(Ask.request(who));
      return askers
          .decide()
          .ask(Ask.mayFetch(who))
          .thenCombineAsync(
              one,
              (fetch, requests) -> {
                pause(kind, requests);
                if (fetch.largestFetch() < request.maxBytes()) {
                  request.setMaxBytes((int) fetch.largestFetch());
                }
                Decision worse = fetch.or(requests);
                return new Decision(
                    worse.verdict(),
                    worse.throttleMs(),
                    worse.quota(),
                    fetch.largestFetch(),
                    fetch.counted());
              },
              executor);
    }

    @Override
    boolean canBeTold() {
      return true;
    }

    @Override
    ApiMessage throttled(int throttleMs) {
      return Fetch.empty(request, throttleMs);
    }

    @Override
    ApiMessage rejected() {
      return Fetch.refused(request, Errors.POLICY_VIOLATION);
    }
  }

  /** Changes of topics. */
  private final class Mutating extends Work<ApiMessage> {
    private final ApiKeys api;

    Mutating(ApiKeys api, RequestHeaderData header, ApiMessage request, FilterContext context) {
      super(Kind.MUTATION, header, request, context);
      this.api = api;
    }

    @Override
    CompletionStage<Decision> ask() {
      var unknown = Mutations.unknown(request);
      if (unknown == null) {
        return askFor(new MetadataResponseData());
      }
      var asking = new RequestHeaderData().setRequestApiVersion(metadataVersion);
      return context
          .<MetadataResponseData>sendRequest(asking, unknown)
          .exceptionally(failure -> new MetadataResponseData())
          .thenCompose(this::askFor);
    }

    private CompletionStage<Decision> askFor(MetadataResponseData known) {
      return askers.decide().ask(Ask.mutations(who, Mutations.count(request, known)));
    }

    @Override
    boolean canBeTold() {
      return Mutations.knowsError(api, header.requestApiVersion());
    }

    @Override
    ApiMessage throttled(int throttleMs) {
      return Mutations.refused(request, Errors.THROTTLING_QUOTA_EXCEEDED, throttleMs);
    }

    @Override
    ApiMessage rejected() {
      return Mutations.refused(request, Errors.POLICY_VIOLATION, 0);
    }
  }

  /** All other requests: counted while the broker works on them, slowed down, and never refused. */
  private final class Other extends Work<ApiMessage> {
    Other(ApiKeys api, RequestHeaderData header, ApiMessage request, FilterContext context) {
      super(api == ApiKeys.SHARE_FETCH ? Kind.FETCH : Kind.ANY, header, request, context);
    }

    @Override
    CompletionStage<RequestFilterResult> begin() {
      return leftMs(kind) == 0 ? overdue(0) : super.begin();
    }

    @Override
    CompletionStage<RequestFilterResult> overdue(long leftMs) {
      return forwarded(
          kind == Kind.FETCH,
          ask()
              .thenApplyAsync(
                  decision -> {
                    pause(kind, decision);
                    return decision;
                  },
                  executor));
    }

    @Override
    CompletionStage<Decision> ask() {
      CompletionStage<Decision> one = askers.decide().ask(Ask.request(who));
      return kind == Kind.FETCH
          ? one.thenCombine(askers.decide().ask(Ask.mayFetch(who)), Decision::or)
          : one;
    }

    @Override
    boolean canBeTold() {
      return false;
    }

    @Override
    ApiMessage throttled(int throttleMs) {
      throw new IllegalStateException("it is forwarded when it was held long enough");
    }

    @Override
    ApiMessage rejected() {
      throw new IllegalStateException("it is forwarded when it was held long enough");
    }
  }
}
