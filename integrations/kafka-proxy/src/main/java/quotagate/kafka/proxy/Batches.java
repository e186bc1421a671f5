// Keeps the order of an idempotent producer's batches when one of them has to wait.
package quotagate.kafka.proxy;

import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/**
 * The batches of one connection that were refused.
 *
 * <p>A producer sends up to five requests ahead. If the first is refused and the second is admitted
 * a moment later, the broker sees the second first. From a producer that it does not know yet, it
 * takes any first sequence number, and the first batch is then out of order for ever. So a batch
 * that follows a refused batch is refused as well, until the refused batch has come again.
 */
final class Batches {
  /**
   * The longest time that a refused batch holds its producer: the client may have given the batch
   * up.
   */
  static final long FORGET_AFTER_NANOS = TimeUnit.MINUTES.toNanos(5);

  private static final int MAX_REFUSED = 10_000;

  /** The producer and the partition of a batch. */
  record Stream(long producerId, String topic, int partition) {}

  /** A batch of a producer with an id. */
  record Batch(Stream stream, short epoch, int sequence) {}

  private record Refused(short epoch, int sequence, long at) {}

  private final Map<Stream, Refused> refused = new LinkedHashMap<>();

  /** Whether one of these batches follows a refused batch that has not come again. */
  boolean follow(Collection<Batch> batches, long nowNanos) {
    if (refused.isEmpty()) {
      return false;
    }
    return batches.stream().anyMatch(batch -> follows(batch, nowNanos));
  }

  private boolean follows(Batch batch, long nowNanos) {
    Refused first = refused.get(batch.stream());
    return first != null
        && first.epoch() == batch.epoch()
        && nowNanos - first.at() < FORGET_AFTER_NANOS
        && isAfter(batch.sequence(), first.sequence());
  }

  /** Remember that these batches were refused. */
  void refuse(Collection<Batch> batches, long nowNanos) {
    for (Batch batch : batches) {
      if (!follows(batch, nowNanos)) {
        refused.remove(batch.stream()); // so that it is the newest
        refused.put(batch.stream(), new Refused(batch.epoch(), batch.sequence(), nowNanos));
      }
    }
    var oldest = refused.keySet().iterator();
    for (int more = refused.size() - MAX_REFUSED; more > 0; more--) {
      oldest.next();
      oldest.remove();
    }
  }

  /** Take note that these batches went through. */
  void admit(Collection<Batch> batches) {
    if (!refused.isEmpty()) {
      batches.forEach(batch -> refused.remove(batch.stream()));
    }
  }

  /** Sequence numbers go on at 0 after the largest integer. */
  private static boolean isAfter(int sequence, int other) {
    int ahead = (sequence - other) & Integer.MAX_VALUE;
    return ahead > 0 && ahead < 1 << 30;
  }
}
