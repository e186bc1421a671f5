// The earliest time at which a request can have been sent.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import org.junit.jupiter.api.Test;

class ArrivalsTest {
  private final Arrivals arrivals = new Arrivals();

  @Test
  void requestOfAnIdleConnectionHasJustCome() {
    assertEquals(100, arrivals.begin(100, true));
    arrivals.answer(5_000);
    assertEquals(5_001, arrivals.begin(5_001, true));
  }

  @Test
  void requestBehindAnotherMayHaveComeWithIt() {
    assertEquals(100, arrivals.begin(100, true));
    assertEquals(100, arrivals.begin(9_000, true));
    arrivals.answer(9_100);
    assertEquals(100, arrivals.begin(9_200, true));
  }

  @Test
  void requestCameAfterTheAnswerToTheFifthBeforeIt() {
    arrivals.begin(0, true);
    for (long now = 1_000; now < 1_000 + Arrivals.AHEAD; now++) {
      assertEquals(0, arrivals.begin(now, true));
      arrivals.answer(now);
    }
    assertEquals(1_000, arrivals.begin(9_000, true));
    arrivals.answer(9_001);
    assertEquals(1_001, arrivals.begin(9_002, true));
  }

  @Test
  void requestBehindARefusedOneMayHaveComeWithIt() {
    assertEquals(100, arrivals.begin(100, true));
    arrivals.answer(15_100);
    arrivals.refuse();
    assertTrue(arrivals.isDraining());
    assertEquals(100, arrivals.begin(15_101, true));
    arrivals.answer(15_102);
    arrivals.refuse();
    arrivals.drain();
    assertTrue(arrivals.isDraining());
    arrivals.drain();
    assertFalse(arrivals.isDraining());
    assertEquals(15_200, arrivals.begin(15_200, true));
  }

  @Test
  void clientThatSendsManyAheadMayHaveSentAllAtOnce() {
    arrivals.begin(0, false);
    for (long now = 1_000; now < 1_000 + 2 * Arrivals.AHEAD; now++) {
      assertEquals(0, arrivals.begin(now, false));
      arrivals.answer(now);
    }
  }
}
