// The quotas of a catalog that a broker can enforce.
package quotagate.kafka.plugin;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.EnumMap;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.server.quota.ClientQuotaType;

/**
 * The ladders of Kafka's quota types.
 *
 * @param ladders the ladders by type; a missing ladder has no rules
 * @param zeros quotas with limit 0, as {@code KEY of ENTITY}; no broker can enforce them
 */
record Quotas(Map<ClientQuotaType, Ladder> ladders, List<String> zeros) {
  static final Quotas NONE = new Quotas(Map.of(), List.of());

  private static final Map<String, ClientQuotaType> TYPES =
      Map.of(
          "producer_byte_rate", ClientQuotaType.PRODUCE,
          "consumer_byte_rate", ClientQuotaType.FETCH,
          "request_percentage", ClientQuotaType.REQUEST,
          "controller_mutation_rate", ClientQuotaType.CONTROLLER_MUTATION);

  Ladder ladder(ClientQuotaType type) {
    return ladders.getOrDefault(type, Ladder.EMPTY);
  }

  /** How many rules there are. */
  int size() {
    return ladders.values().stream().mapToInt(ladder -> ladder.rules().size()).sum();
  }

  /** Collects quotas from the pages of Quotagate's list. */
  static final class Builder {
    private final Map<ClientQuotaType, Map<Entity, Rule>> rules =
        new EnumMap<>(ClientQuotaType.class);
    private final List<String> zeros = new ArrayList<>();

    /** Take an entity of the list, as far as brokers can enforce its quotas. */
    void add(JsonNode listed) {
      String spelled = listed.path("entity").asText();
      Entity entity = Entity.parse(spelled);
      if (entity == null) {
        return;
      }
      listed
          .path("quotas")
          .fields()
          .forEachRemaining(
              quota -> {
                ClientQuotaType type = TYPES.get(quota.getKey());
                if (type != null) {
                  Rule rule = rule(quota.getValue());
                  rules.computeIfAbsent(type, each -> new HashMap<>()).put(entity, rule);
                  if (rule.limit() == 0 && !rule.shadow()) {
                    zeros.add(quota.getKey() + " of " + spelled);
                  }
                }
              });
    }

    private static Rule rule(JsonNode quota) {
      JsonNode limit = quota.isNumber() ? quota : quota.path("limit");
      if (!limit.isNumber()) {
        throw new IllegalArgumentException("a quota without a limit: " + quota);
      }
      return new Rule(
          limit.asDouble(),
          quota.path("shadow").asBoolean(),
          quota.path("scope").asText().equals("broker"));
    }

    Quotas build() {
      Map<ClientQuotaType, Ladder> ladders = new EnumMap<>(ClientQuotaType.class);
      rules.forEach((type, each) -> ladders.put(type, new Ladder(each)));
      return new Quotas(ladders, List.copyOf(zeros));
    }
  }
}
