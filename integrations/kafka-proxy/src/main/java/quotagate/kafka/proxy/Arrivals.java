// When a request can have left its client, which waits for an answer from then on.
package quotagate.kafka.proxy;

import java.util.ArrayDeque;
import java.util.Deque;

/**
 * The requests of one connection, in their order.
 *
 * <p>While a request is held, those behind it are not read. So the proxy sees a request later than
 * it was sent, and a client's patience counts from when it was sent. It was sent after the
 * connection was last idle; and by a client that sends few ahead, after the answer to the fifth
 * request before it.
 */
final class Arrivals {
  /** How many requests an idempotent producer sends ahead, at most. */
  static final int AHEAD = 5;

  private final Deque<Long> answers = new ArrayDeque<>();
  private int unanswered;
  private int refusals;
  private long busySince;

  /** Take note of a request; since when it may have been under way, at most. */
  long begin(long nowMs, boolean fewAhead) {
    if (unanswered == 0 && !isDraining()) {
      busySince = nowMs;
      answers.clear();
    }
    unanswered++;
    return fewAhead && answers.size() == AHEAD ? answers.getFirst() : busySince;
  }

  /** Take note of an answer. */
  void answer(long nowMs) {
    unanswered--;
    answers.addLast(nowMs);
    if (answers.size() > AHEAD) {
      answers.removeFirst();
    }
  }

  /** Take note that a request was refused: what the client had sent behind it comes next. */
  void refuse() {
    refusals++;
  }

  /** Take note that what was sent before that refusal has been read. */
  void drain() {
    refusals--;
  }

  /** Whether the next request may have been sent before an earlier one was refused. */
  boolean isDraining() {
    return refusals > 0;
  }
}
