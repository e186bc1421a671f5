// The memory that held requests take.
package quotagate.kafka.proxy;

import java.util.concurrent.atomic.AtomicLong;

/**
 * The bytes of records that wait in all connections together. A request that does not fit is
 * answered at once, as if its hold were used up.
 */
final class Holds {
  private final long most;
  private final AtomicLong bytes = new AtomicLong();

  Holds(long mostBytes) {
    most = mostBytes;
  }

  /** Take room for a request; false if it does not fit. */
  boolean take(long requestBytes) {
    if (bytes.addAndGet(requestBytes) <= most) {
      return true;
    }
    bytes.addAndGet(-requestBytes);
    return false;
  }

  /** Give back the room of a request. */
  void release(long requestBytes) {
    bytes.addAndGet(-requestBytes);
  }
}
