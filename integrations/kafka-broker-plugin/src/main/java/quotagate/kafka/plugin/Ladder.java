// Kafka's ladder: which rule holds for a client, and which bucket its usage goes to.
package quotagate.kafka.plugin;

import java.util.Map;
import org.jspecify.annotations.Nullable;

/** The rules of one quota key; they do not change. */
final class Ladder {
  static final Ladder EMPTY = new Ladder(Map.of());

  private final Map<Entity, Rule> rules;

  Ladder(Map<Entity, Rule> rules) {
    this.rules = Map.copyOf(rules);
  }

  /**
   * The bucket of a client: the pair, the user or the client-id, by the first of Kafka's eight
   * levels that has a rule. Without any rule it is the client-id, as with Kafka's own quotas.
   *
   * @param user null if the client has no name
   */
  Entity bucket(@Nullable String user, String client) {
    if (user != null && !rules.isEmpty()) {
      for (String name : new String[] {user, Entity.DEFAULT}) {
        if (has(name, client) || has(name, Entity.DEFAULT)) {
          return new Entity(user, client);
        }
        if (has(name, null)) {
          return new Entity(user, null);
        }
      }
    }
    return new Entity(null, client);
  }

  /** The rule of a bucket; null if it has none. */
  @Nullable Rule rule(Entity bucket) {
    if (rules.isEmpty()) {
      return null;
    }
    String user = bucket.user();
    String client = bucket.client();
    if (user == null) {
      return first(rules.get(bucket), null, Entity.DEFAULT);
    }
    if (client == null) {
      return first(rules.get(bucket), Entity.DEFAULT, null);
    }
    Rule own = first(rules.get(bucket), user, Entity.DEFAULT);
    return first(first(own, Entity.DEFAULT, client), Entity.DEFAULT, Entity.DEFAULT);
  }

  @Nullable
  private Rule first(@Nullable Rule found, @Nullable String user, @Nullable String client) {
    return found != null ? found : rules.get(new Entity(user, client));
  }

  private boolean has(@Nullable String user, @Nullable String client) {
    return rules.containsKey(new Entity(user, client));
  }

  /** The rules, by entity. */
  Map<Entity, Rule> rules() {
    return rules;
  }
}
