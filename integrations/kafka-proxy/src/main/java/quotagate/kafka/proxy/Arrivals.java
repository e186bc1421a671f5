// The earliest time at which a client can have sent a request, and begun to wait.
package quotagate.kafka.proxy;

import java.util.ArrayDeque;
import java.util.Deque;

/**
 * The requests of one connection, in their order.
 *
 * <p>While a request is held, the requests behind it are not read. So the proxy sees a request
 * later than it was sent, but a client's patience counts from the sending. A request was sent after
 * the connection was last idle. A client that sends few requests ahead sent it after the answer to
 * the fifth request before it.
 */
final class Arrivals {
  /** How many requests an idempotent producer sends ahead, at most. */
  static final int AHEAD = 5;

  private final Deque<Long> answers = new ArrayDeque<>();
  private int unanswered;
  private int refusals;
  private long busySince;

  /** Take note of a request; returns the earliest time at which it can have been sent. */
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

  /** Take note that a request was refused: the requests that were sent behind it come next. */
  void refuse() {
    refusals++;
  }

  /** Take note that the requests sent before that refusal have been read. */
  void drain() {
    refusals--;
  }

  /** Whether the next request may have been sent before an earlier one was refused. */
  boolean isDraining() {
    return refusals > 0;
  }
}
