// Kafka's ladder, and buckets as tags.
package quotagate.kafka.plugin;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertNull;

import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.junit.jupiter.api.Test;

class LadderTest {
  private static final String ANY = Entity.DEFAULT;

  /** The eight levels for alice's client etl, in Kafka's order, with the bucket of each. */
  private static final List<Entity> LEVELS =
      List.of(
          new Entity("alice", "etl"),
          new Entity("alice", ANY),
          new Entity("alice", null),
          new Entity(ANY, "etl"),
          new Entity(ANY, ANY),
          new Entity(ANY, null),
          new Entity(null, "etl"),
          new Entity(null, ANY));

  private static final Entity PAIR = new Entity("alice", "etl");
  private static final Entity USER = new Entity("alice", null);
  private static final Entity CLIENT = new Entity(null, "etl");
  private static final List<Entity> BUCKETS =
      List.of(PAIR, PAIR, USER, PAIR, PAIR, USER, CLIENT, CLIENT);

  private static Rule limit(double limit) {
    return new Rule(limit, false, false);
  }

  @Test
  void firstLevelDecidesInEverySetOfLevels() {
    for (int set = 0; set < 256; set++) {
      Map<Entity, Rule> rules = new HashMap<>();
      int first = -1;
      for (int level = 0; level < LEVELS.size(); level++) {
        if ((set & (1 << level)) != 0) {
          rules.put(LEVELS.get(level), limit(level + 1));
          first = first < 0 ? level : first;
        }
      }
      // Others' quotas change nothing.
      rules.put(new Entity("bob", null), limit(100));
      rules.put(new Entity("bob", "etl"), limit(100));
      rules.put(new Entity(null, "other"), limit(100));
      var ladder = new Ladder(rules);
      Entity bucket = ladder.bucket("alice", "etl");
      assertEquals(first < 0 ? CLIENT : BUCKETS.get(first), bucket, "levels " + set);
      Rule found = ladder.rule(Tags.bucket(Tags.of(bucket, false)));
      assertEquals(first < 0 ? null : limit(first + 1), found, "levels " + set);
    }
  }

  @Test
  void clientWithoutNameHasQuotasOfItsClientIdAlone() {
    var ladder =
        new Ladder(
            Map.of(
                new Entity(ANY, null), limit(1), new Entity(ANY, ANY), limit(2), CLIENT, limit(3)));
    assertEquals(CLIENT, ladder.bucket(null, "etl"));
    assertEquals(limit(3), ladder.rule(CLIENT));
  }

  @Test
  void emptyClientIdIsLimitedByDefaultsAndApartFromItsUser() {
    var ladder = new Ladder(Map.of(new Entity("alice", ANY), limit(1), USER, limit(2)));
    Entity bucket = ladder.bucket("alice", "");
    assertEquals(new Entity("alice", ""), bucket);
    assertEquals(bucket, Tags.bucket(Tags.of(bucket, false)));
    assertEquals(limit(1), ladder.rule(bucket));
    assertNotEquals(Tags.of(USER, false), Tags.of(bucket, false));

    var clients = new Ladder(Map.of(new Entity(null, ANY), limit(3)));
    Entity nameless = clients.bucket("alice", "");
    assertEquals(new Entity(null, ""), nameless);
    assertEquals(limit(3), clients.rule(Tags.bucket(Tags.of(nameless, false))));
  }

  @Test
  void tagsAreThoseOfKafkasOwnQuotas() {
    assertEquals(Map.of("user", "alice", "client-id", "etl"), Tags.of(PAIR, false));
    assertEquals(Map.of("user", "alice", "client-id", ""), Tags.of(USER, false));
    assertEquals(Map.of("user", "", "client-id", "etl"), Tags.of(CLIENT, false));
    assertEquals("CN%3Da%20b%2A", Tags.of(new Entity("CN=a b*", null), false).get("user"));
  }

  @Test
  void everyNameReturnsFromItsTagsAndNamesItsOwnSensor() {
    List<String> names =
        List.of("a", "a:b", ":", "%pair", "%", "*", "ä/=+ ,", "%excluded", "a:b:c");
    Set<Entity> buckets = new HashSet<>();
    Set<String> sensors = new HashSet<>();
    for (String user : names) {
      buckets.add(new Entity(user, null));
      buckets.add(new Entity(user, ""));
      buckets.add(new Entity(null, user));
      for (String client : names) {
        buckets.add(new Entity(user, client));
      }
    }
    for (Entity bucket : buckets) {
      Map<String, String> tags = Tags.of(bucket, false);
      assertEquals(bucket, Tags.bucket(tags));
      // The name of the broker's sensor.
      sensors.add(String.join(":", tags.values()));
    }
    assertEquals(buckets.size(), sensors.size());
  }

  @Test
  void entitiesAreReadAsQuotagateSpellsThem() {
    assertEquals(PAIR, Entity.parse("user=alice,client-id=etl"));
    assertEquals(new Entity(ANY, ANY), Entity.parse("user=*,client-id=*"));
    assertEquals(new Entity("*", null), Entity.parse("user=%2A"));
    assertEquals(new Entity(null, "a+b c,=ä"), Entity.parse("client-id=a%2Bb%20c%2C%3D%C3%A4"));
    assertEquals(new Entity(null, ""), Entity.parse("client-id="));
    assertNull(Entity.parse("ip=10.0.0.7"));
    assertNull(Entity.parse("broker=1,listener=EXTERNAL"));
  }

  @Test
  void nameOfStarIsNotTheDefault() {
    var ladder = new Ladder(Map.of(new Entity("*", null), limit(1)));
    assertEquals(new Entity("*", null), ladder.bucket("*", "etl"));
    assertNull(ladder.rule(ladder.bucket("alice", "etl")));
  }
}
