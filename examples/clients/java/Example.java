// Puts a quota, asks until throttled, reads the error of a bad ask, and deletes the quota.
// An overloaded node refuses an ask with 503, and charges nothing; decide asks again after its Retry-After.

import com.fasterxml.jackson.databind.ObjectMapper;
import io.quotagate.api.ApiClient;
import io.quotagate.api.ApiException;
import io.quotagate.api.DecisionsApi;
import io.quotagate.api.QuotasApi;
import io.quotagate.api.model.Ask;
import io.quotagate.api.model.Decision;
import io.quotagate.api.model.Problem;
import io.quotagate.api.model.Quota;
import io.quotagate.api.model.QuotaSet;
import io.quotagate.api.model.Usage;
import java.math.BigDecimal;
import java.util.concurrent.ThreadLocalRandom;

public class Example {
    private static final String WHO = "example-java";
    private static final String ENTITY = "user=" + WHO + ",client-id=*";
    private static final String OVERLOADED = "urn:quotagate:overloaded";

    public static void main(String[] arguments) throws Exception {
        ApiClient client = new ApiClient();
        client.updateBaseUri(System.getenv().getOrDefault("QUOTAGATE_URL", "http://127.0.0.1:8080"));
        String key = System.getenv("QUOTAGATE_KEY");
        client.setRequestInterceptor(request -> request.header("Authorization", "Bearer " + key));
        QuotasApi quotas = new QuotasApi(client);
        DecisionsApi decisions = new DecisionsApi(client);

        Quota three = new Quota()
                .limit(new BigDecimal("0.1"))
                .algorithm(Quota.AlgorithmEnum.TOKEN_BUCKET)
                .burst(new BigDecimal(3))
                .enforcement(Quota.EnforcementEnum.DENY);
        String put = quotas.putQuotas(ENTITY, new QuotaSet().requestRate(three), null, null, null).getEntity();
        System.out.println("put " + put);

        Ask ask = new Ask().principal(WHO).clientId("app").usage(new Usage().requests(1L));
        int admitted = 0;
        Decision said = decide(decisions, ask, 3);
        while (said.getDecision() == Decision.DecisionEnum.ADMIT && admitted < 100) {
            admitted += 1;
            said = decide(decisions, ask, 3);
        }
        System.out.println("admitted " + admitted + " times, then " + said.getDecision());

        try {
            decisions.decideOneAsk(new Ask().principal(WHO).usage(new Usage().requests(-1L)));
        } catch (ApiException refused) {
            Problem problem = new ObjectMapper().readValue(refused.getResponseBody(), Problem.class);
            System.out.println("a bad ask: " + problem.getErrors().get(0).getField());
        }

        quotas.deleteQuotas(ENTITY, null, null, null);
        System.out.println("deleted");
    }

    /** A decision; an overloaded node is asked again up to so many times, a little after its Retry-After. */
    private static Decision decide(DecisionsApi decisions, Ask ask, int times) throws Exception {
        for (int left = times; ; left--) {
            try {
                return decisions.decideOneAsk(ask);
            } catch (ApiException refused) {
                if (left == 0 || refused.getCode() != 503) {
                    throw refused;
                }
                String type = new ObjectMapper().readTree(refused.getResponseBody()).path("type").asText();
                if (!OVERLOADED.equals(type)) {
                    throw refused;
                }
                String after = refused.getResponseHeaders().firstValue("Retry-After").orElse("1");
                double jitter = 1 + ThreadLocalRandom.current().nextDouble() / 10;
                Thread.sleep(Math.round(Integer.parseInt(after) * 1000 * jitter));
            }
        }
    }
}
