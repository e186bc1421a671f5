// Names are learnt from PLAIN and SCRAM, and only once the broker accepted them.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.charset.StandardCharsets;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class SaslTest {
  private final Sasl sasl = new Sasl();

  private boolean sent(String message) {
    return sasl.sent(message.getBytes(StandardCharsets.UTF_8));
  }

  @Test
  void plainNameCountsOnceAccepted() {
    assertTrue(sasl.begin("PLAIN"));
    assertTrue(sent("\0älice\0secret"));
    assertEquals(Sasl.ANONYMOUS, sasl.principal());
    sasl.accepted();
    assertEquals("älice", sasl.principal());
  }

  @Test
  void scramNameCountsAfterBothAnswers() {
    assertTrue(sasl.begin("SCRAM-SHA-512"));
    assertTrue(sent("n,,n=d=2Cave=3D2C,r=nonce"));
    sasl.accepted();
    assertEquals(Sasl.ANONYMOUS, sasl.principal());
    assertTrue(sent("c=biws,r=nonce,p=proof"));
    sasl.accepted();
    assertEquals("d,ave=2C", sasl.principal());
  }

  @Test
  void oldNameStandsUntilANewOneIsAccepted() {
    sasl.begin("PLAIN");
    sent("\0alice\0secret");
    sasl.accepted();
    sasl.begin("PLAIN");
    sent("\0bob\0wrong");
    assertEquals("alice", sasl.principal());
  }

  @ParameterizedTest
  @ValueSource(strings = {"OAUTHBEARER", "GSSAPI", "", "SCRAM-SHA-1"})
  void otherMechanismsAreRefused(String mechanism) {
    assertFalse(sasl.begin(mechanism));
  }

  @ParameterizedTest
  @ValueSource(strings = {"", "alice", "\0\0secret", "a\0b\0c\0d"})
  void unreadablePlainIsRefused(String message) {
    sasl.begin("PLAIN");
    assertFalse(sent(message));
  }

  @ParameterizedTest
  @ValueSource(
      strings = {
        "",
        "n,,r=nonce",
        "n,,n=,r=nonce",
        "n,,n=d,ave,r=nonce",
        "n,,n=token,r=nonce,tokenauth=true"
      })
  void unreadableScramIsRefused(String message) {
    sasl.begin("SCRAM-SHA-256");
    assertFalse(sent(message));
  }
}
