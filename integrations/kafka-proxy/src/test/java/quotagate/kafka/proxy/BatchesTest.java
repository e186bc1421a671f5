// The order of an idempotent producer's batches is kept when one of them has to wait.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import org.junit.jupiter.api.Test;

class BatchesTest {
  private final Batches batches = new Batches();

  private static List<Batches.Batch> batch(long id, int epoch, int sequence) {
    return List.of(new Batches.Batch(new Batches.Stream(id, "t", 0), (short) epoch, sequence));
  }

  @Test
  void batchAfterARefusedOneFollowsIt() {
    batches.refuse(batch(1, 0, 5), 0);
    assertTrue(batches.follow(batch(1, 0, 6), 0));
    assertTrue(batches.follow(batch(1, 0, 1_000), 0));
  }

  @Test
  void refusedBatchItselfMayComeAgain() {
    batches.refuse(batch(1, 0, 5), 0);
    batches.refuse(batch(1, 0, 6), 0); // which changes nothing
    assertFalse(batches.follow(batch(1, 0, 5), 0));
    batches.admit(batch(1, 0, 5));
    assertFalse(batches.follow(batch(1, 0, 6), 0));
  }

  @Test
  void sequencesGoOnAtZero() {
    batches.refuse(batch(1, 0, Integer.MAX_VALUE), 0);
    assertTrue(batches.follow(batch(1, 0, 0), 0));
    assertFalse(batches.follow(batch(1, 0, Integer.MAX_VALUE - 1), 0));
  }

  @Test
  void otherProducersAndEpochsAreFree() {
    batches.refuse(batch(1, 0, 5), 0);
    assertFalse(batches.follow(batch(2, 0, 6), 0));
    assertFalse(batches.follow(batch(1, 1, 6), 0));
  }

  @Test
  void batchThatNeverComesAgainIsForgotten() {
    batches.refuse(batch(1, 0, 5), 0);
    assertTrue(batches.follow(batch(1, 0, 6), Batches.FORGET_AFTER_NANOS - 1));
    assertFalse(batches.follow(batch(1, 0, 6), Batches.FORGET_AFTER_NANOS));
  }

  @Test
  void memoryIsBounded() {
    for (int id = 0; id < 20_000; id++) {
      batches.refuse(batch(id, 0, 5), 0);
    }
    assertFalse(batches.follow(batch(0, 0, 6), 0));
    assertTrue(batches.follow(batch(19_999, 0, 6), 0));
  }
}
