// The room for held requests is bounded.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import org.junit.jupiter.api.Test;

class HoldsTest {
  @Test
  void roomIsTakenAndGivenBack() {
    var holds = new Holds(1_000);
    assertTrue(holds.take(600));
    assertFalse(holds.take(401));
    assertTrue(holds.take(400));
    assertFalse(holds.take(1));
    assertTrue(holds.take(0));
    holds.release(600);
    assertTrue(holds.take(600));
  }
}
