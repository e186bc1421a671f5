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
 * the thread of the connection; so decisions from other threads come back through that thread's
 * executor.
 *
 * <p>A request that has to wait is held here, as long as its client waits for an answer without
 * harm and for {@link #LONGEST_HOLD_MS} at most. Then the client gets a {@code throttle_time_ms}.
 * As in a broker, its connection then pauses: further requests are held likewise.
 */
final class QuotaFilter implements RequestFilter, ResponseFilter {
  /**
   * The longest time that a request is held. The proxy closes a connection when its filter takes 20
   * s.
   */
  static final long LONGEST_HOLD_MS = 15_000;

  // Requests that a producer had sent before it was refused are read in the next turns of the
  // connection's thread, and are not held; requests sent again come after its back-off (100 ms or
  // more). Other clients have one request under way.
  private static final long DRAIN_MS = 20;

  // The throttle time of a request that was held and then went through: the client's own metrics
  // show it.
  private static final int HELD_MS = 1;

  // The interval at which a held request is asked for again: a wait may end early, for instance
  // when a disk has room again.
  private static final long ASK_AGAIN_MS = 1_000;
  private static final short METADATA_VERSION = 12; // the first with topic ids without names
  private static final short FIRST_TOLD_PRODUCE =
      6; // KIP-219: from then on clients pause by themselves

  /** The kinds of requests that pause separately: a client that may not produce may still fetch. */
  private enum Kind {
    PRODUCE,
    FETCH,
    MUTATION,
    ANY
  }

  /** How to process the response to a forwarded request. */
  private record Expected(
      Kind kind, Ask.Who who, boolean counted, boolean held, CompletionStage<Decision> late) {}

  private final Askers askers;
  private final FilterDispatchExecutor executor;
  private final Sasl sasl = new Sasl();
  private final Batches batches = new Batches();
  private final Arrivals arrivals = new Arrivals();
  private final Map<Integer, Expected> expected = new HashMap<>();
  private final Map<Kind, Long> pausedUntil = new EnumMap<>(Kind.class);
  private Software software = Software.UNKNOWN;
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
      case PRODUCE -> {
        var producing = (ProduceRequestData) request;
        yield new Producing(header, producing, Produce.of(producing), context).result();
      }
      case FETCH -> new Fetching(header, (FetchRequestData) request, context).result();
      case CREATE_TOPICS, DELETE_TOPICS, CREATE_PARTITIONS ->
          new Mutating(kind, header, request, context).result();
      default -> new Other(kind, header, request, context).result();
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
      Versions.leaveOutUnknown(versions);
    }
    Expected found = expected.remove(header.correlationId());
    if (found == null) {
      return context.forwardResponse(header, response);
    }
    arrivals.answer(nowMs());
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
              long left = leftMs(found.kind());
              ThrottleTimes.raise(response, found.held() ? Math.max(left, HELD_MS) : left);
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

  /** One request, from its arrival until it is forwarded or answered. */
  private abstract class Work<R extends ApiMessage> {
    final Kind kind;
    final RequestHeaderData header;
    final R request;
    final FilterContext context;
    final Ask.Who who;
    private final long holdMs;
    private final long until;
    private boolean held;

    Work(
        Kind kind,
        RequestHeaderData header,
        R request,
        FilterContext context,
        long holdMs,
        boolean fewAhead) {
      this.kind = kind;
      this.header = header;
      this.request = request;
      this.context = context;
      // A broker reads a missing client-id as an empty one.
      String clientId = header.clientId() == null ? "" : header.clientId();
      this.who = new Ask.Who(sasl.principal(), clientId);
      this.holdMs = holdMs;
      this.until = arrivals.begin(nowMs(), fewAhead) + holdMs;
    }

    abstract CompletionStage<Decision> ask();

    /** Whether the client waits by itself when it gets a throttle time; other clients are held. */
    abstract boolean canBeTold();

    /** Whether the request is held for as long as possible, rather than answered. */
    boolean isHeldFor(Decision decision, long leftMs) {
      return !canBeTold() || software.isHeldFor(decision.throttleMs(), leftMs);
    }

    /** The bytes that the request keeps in memory while it is held. */
    long bytes() {
      return 0;
    }

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
      expected.put(header.correlationId(), new Expected(kind, who, counted, held, late));
      return context.forwardRequest(header, request);
    }

    /** Forward or answer the request, now or after a hold. */
    final CompletionStage<RequestFilterResult> result() {
      return begin()
          .whenComplete(
              (ignored, failure) -> {
                if (held) {
                  askers.holds().release(bytes());
                }
              });
    }

    CompletionStage<RequestFilterResult> begin() {
      long left = leftMs(kind);
      if (left == 0) {
        return ask().thenComposeAsync(this::decided, executor);
      }
      boolean queued = kind == Kind.PRODUCE && canBeTold() && arrivals.isDraining();
      long hold = queued ? 0 : Math.min(left, until - nowMs());
      return hold > 0 && keep()
          ? later(hold).thenComposeAsync(ignored -> begin(), executor)
          : overdue(left);
    }

    /** End a hold that is used up. */
    CompletionStage<RequestFilterResult> overdue(long leftMs) {
      return answer(throttled(pauseMs(leftMs)));
    }

    /**
     * How long the client is asked to pause. A client that counts errors is asked to pause for at
     * least as long as it was held, so that few errors last long.
     */
    private int pauseMs(long leftMs) {
      long pause = held && software.countsErrors() ? Math.max(leftMs, holdMs) : leftMs;
      return (int) Math.min(pause, Integer.MAX_VALUE);
    }

    private CompletionStage<RequestFilterResult> decided(Decision decision) {
      long left = until - nowMs();
      if (decision.verdict() == Decision.Verdict.THROTTLE
          && left > 0
          && isHeldFor(decision, left)
          && keep()) {
        long hold = Math.min(Math.min(decision.throttleMs(), ASK_AGAIN_MS), left);
        return later(Math.max(1, hold))
            .thenComposeAsync(ignored -> ask(), executor)
            .thenComposeAsync(this::decided, executor);
      }
      pause(kind, decision);
      return switch (decision.verdict()) {
        case ADMIT, DELAY -> forward(decision);
        case THROTTLE -> answer(throttled(pauseMs(decision.throttleMs())));
        case REJECT -> answer(rejected());
      };
    }

    /** Keep the request in memory while it is held; false if there is no room. */
    private boolean keep() {
      held = held || askers.holds().take(bytes());
      return held;
    }

    final CompletionStage<RequestFilterResult> answer(@Nullable ApiMessage response) {
      arrivals.answer(nowMs());
      if (kind == Kind.PRODUCE) {
        arrivals.refuse();
        executor.schedule(arrivals::drain, DRAIN_MS, TimeUnit.MILLISECONDS);
      }
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

    Producing(
        RequestHeaderData header,
        ProduceRequestData request,
        Produce produce,
        FilterContext context) {
      super(
          Kind.PRODUCE,
          header,
          request,
          context,
          software.holdMs(request),
          !produce.ids().isEmpty());
      this.produce = produce;
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
    long bytes() {
      return produce.bytes();
    }

    @Override
    CompletionStage<RequestFilterResult> forward(Decision decision) {
      batches.admit(produce.batches());
      if (isAnswered()) {
        return super.forward(decision);
      }
      arrivals.answer(nowMs()); // none will come
      return context.forwardRequest(header, request);
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
     * With acks=0 a client gets no answer, and a broker that finds an error closes the connection.
     */
    private boolean isAnswered() {
      return request.acks() != 0;
    }
  }

  /** A fetch: limited beforehand to the bytes that may pass now, and recorded afterwards. */
  private final class Fetching extends Work<FetchRequestData> {
    Fetching(RequestHeaderData header, FetchRequestData request, FilterContext context) {
      super(Kind.FETCH, header, request, context, LONGEST_HOLD_MS, true);
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

    /** An empty answer is no error, so no client counts it. */
    @Override
    boolean isHeldFor(Decision decision, long leftMs) {
      return false;
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
      super(Kind.MUTATION, header, request, context, LONGEST_HOLD_MS, true);
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
      super(
          api == ApiKeys.SHARE_FETCH ? Kind.FETCH : Kind.ANY,
          header,
          request,
          context,
          LONGEST_HOLD_MS,
          true);
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
