// Calls every operation with the generated Java client, and prints each answer as it would send it.

import com.fasterxml.jackson.databind.ObjectMapper;
import io.quotagate.api.ApiClient;
import io.quotagate.api.BucketsApi;
import io.quotagate.api.DecisionsApi;
import io.quotagate.api.HealthApi;
import io.quotagate.api.KeysApi;
import io.quotagate.api.LeasesApi;
import io.quotagate.api.OverviewApi;
import io.quotagate.api.QuotasApi;
import io.quotagate.api.ReportsApi;
import io.quotagate.api.VolumesApi;
import io.quotagate.api.model.*;
import java.math.BigDecimal;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

public class Operations {
    private static final String WHO = "operations-java";
    private static final String ENTITY = "user=" + WHO;
    private static final List<Object> SAID = new ArrayList<>();
    private static ObjectMapper mapper;

    /** Note an answer as the client would send it. */
    private static <T> T say(String operation, T answer) {
        SAID.add(Arrays.asList(operation, answer));
        return answer;
    }

    /** Send back the quotas that were read, patch, and read the history and the shadow quotas. */
    private static void ofQuotas(QuotasApi quotas) throws Exception {
        QuotaSet wanted = new QuotaSet()
                .requestRate(new Quota()
                        .limit(new BigDecimal("16777217.5"))
                        .burst(new BigDecimal("3000000000"))
                        .algorithm(Quota.AlgorithmEnum.TOKEN_BUCKET)
                        .enforcement(Quota.EnforcementEnum.DENY))
                .producerByteRate(new Quota().limit(new BigDecimal("9007199254740991")))
                .producerIdsRate(new Quota()
                        .limit(new BigDecimal(5))
                        .layers(Map.of("interval_ms", 3_600_000L, "ttl_ms", 7_200_000L)))
                .consumerByteRate(new Quota().limit(new BigDecimal("2147483649")).shadow(true));
        say("put_quotas", quotas.putQuotas(ENTITY, wanted, null, null, "the first"));
        EntityQuotas read = say("get_quotas", quotas.getQuotas(ENTITY, null, null));
        say("put_quotas", quotas.putQuotas(ENTITY, read.getQuotas(), null, null, null));
        say("shadow_quotas", quotas.shadowQuotas(ENTITY));
        QuotaPatch patch = new QuotaPatch()
                .requestRate(new QuotaPatchRequestRate().limit(new BigDecimal(10)).burst(null))
                .consumerByteRate(new QuotaPatchProducerByteRate().limit(8L))
                .producerIdsRate(null);
        say("patch_quotas", quotas.patchQuotas(ENTITY, patch, null, null, null));
        QuotaPage page = say("list_quotas", quotas.listQuotas(List.of(ENTITY), true, 10L, null, null, null));
        QuotaHistory history = say("quotas_history", quotas.quotasHistory(ENTITY, null, null));
        QuotaDefinitions before = history.getChanges().get(0).getBefore();
        say("put_quotas", quotas.putQuotas(ENTITY, mapper.convertValue(before, QuotaSet.class), null, null, null));
        Map<String, Object> values = new HashMap<>();
        values.put("request_rate", 7);
        values.put("producer_byte_rate", null);
        QuotaAlteration altered = new QuotaAlteration().entity(ENTITY).quotas(values);
        say("alter_quotas", quotas.alterQuotas(new QuotaAlterations().addAlterationsItem(altered), null, null));
        EntityQuotas found = page.getQuotas().get(0);
        QuotaSettingQuotas set = new QuotaSettingQuotas()
                .requestRate(found.getQuotas().getRequestRate())
                .producerByteRate(found.getQuotas().getProducerByteRate())
                .consumerByteRate(null);
        QuotaSetting setting = new QuotaSetting().entity(found.getEntity()).quotas(set);
        QuotaApplication application = new QuotaApplication().addAlterationsItem(setting).validateOnly(true);
        say("apply_quotas", quotas.applyQuotas(application, null, null));
        say("effective_quotas", quotas.effectiveQuotas(WHO, null, null, null, null));
    }

    /** Decide, take a lease, and look at the buckets. */
    private static void ofDecisions(ApiClient client) throws Exception {
        DecisionsApi decisions = new DecisionsApi(client);
        LeasesApi leases = new LeasesApi(client);
        BucketsApi buckets = new BucketsApi(client);
        Usage usage = new Usage().requests(1L).producerIds(List.of("123", "9223372036854775807"));
        Ask ask = new Ask().principal(WHO).usage(usage).detail(true);
        say("decide_one_ask", decisions.decideOneAsk(ask));
        Batch batch = new Batch().addAsksItem(ask).addAsksItem(new Ask().usage(new Usage().requests(1L)));
        say("decide_a_batch_of_asks", decisions.decideABatchOfAsks(batch));
        say("check_by_get", decisions.checkByGet(
                WHO, null, null, 1L, null, null, null, null, null, null, null, null));
        Wish wish = new Wish().principal(WHO).usage(new LeaseUsage().requests(1L));
        Lease lease = say("take_lease", leases.takeLease(new LeaseRequest().ask(wish).leaseMs(10_000L)));
        Spent spent = new Spent().usage(new LeaseUsage().requests(0L));
        say("end_lease", leases.endLease(lease.getLease(), spent));
        Bucket found = say("get_buckets", buckets.getBuckets(ENTITY, null)).getBuckets().get(0);
        BucketReset reset = new BucketReset()
                .bucket(found.getBucket())
                .quota(BucketReset.QuotaEnum.fromValue(found.getQuota().getValue()));
        buckets.resetBucket(reset);
        say("reset_bucket", null);
    }

    /** List reports, and read the newest. */
    private static void ofReports(ReportsApi reports) throws Exception {
        ReportList listed = say("get_reports", reports.getReports());
        say("get_report", reports.getReport(listed.getReports().get(0).getName()));
    }

    /** Make, rotate and revoke a key. */
    private static void ofKeys(KeysApi keys) throws Exception {
        KeyWanted wanted = new KeyWanted()
                .name(WHO)
                .addScopesItem(KeyWanted.ScopesEnum.DECIDE)
                .addBoundToItem(ENTITY)
                .expiresMs(4_102_444_800_000L);
        say("create_key", keys.createKey(wanted));
        say("get_keys", keys.getKeys());
        say("rotate_key", keys.rotateKey(WHO, new Rotation().graceMs(1_000L)));
        keys.revokeKey(WHO);
        say("revoke_key", null);
    }

    /** Push volumes, read them, push them again, and read a drill in the history. */
    private static void ofVolumes(VolumesApi volumes, QuotasApi quotas) throws Exception {
        PushedVolumes pushed = new PushedVolumes()
                .complete(true)
                .addVolumesItem(new PushedVolumesVolumesInner()
                        .broker("1")
                        .dir("/a")
                        .totalBytes(4_611_686_018_427_387_905L)
                        .availableBytes(9_007_199_254_740_993L))
                .addVolumesItem(new PushedVolumesVolumesInner()
                        .broker("1")
                        .dir("/b")
                        .totalBytes(null)
                        .availableBytes(null));
        say("push_volumes", volumes.pushVolumes(pushed));
        Volumes read = say("get_volumes", volumes.getVolumes());
        PushedVolumes again = new PushedVolumes().complete(true);
        for (Volume each : read.getVolumes()) {
            again.addVolumesItem(new PushedVolumesVolumesInner()
                    .broker(each.getBroker())
                    .dir(each.getDir())
                    .totalBytes(each.getTotalBytes())
                    .availableBytes(each.getAvailableBytes()));
        }
        say("push_volumes", volumes.pushVolumes(again));
        volumes.forgetVolumes("1");
        say("forget_volumes", null);
        DrillWanted drill = new DrillWanted().factor(new BigDecimal("0.5")).forMs(600_000L);
        say("begin_drill", volumes.beginDrill(drill, null));
        volumes.endDrill("over");
        say("end_drill", null);
        say("quotas_history", quotas.quotasHistory("throttle_factor", 2L, null));
    }

    public static void main(String[] arguments) throws Exception {
        ApiClient client = new ApiClient();
        client.updateBaseUri(System.getenv("QUOTAGATE_URL"));
        String key = System.getenv("QUOTAGATE_KEY");
        client.setRequestInterceptor(request -> request.header("Authorization", "Bearer " + key));
        mapper = client.getObjectMapper();
        QuotasApi quotas = new QuotasApi(client);
        HealthApi health = new HealthApi(client);
        ofQuotas(quotas);
        ofDecisions(client);
        say("get_overview", new OverviewApi(client).getOverview("second", 1L));
        ofReports(new ReportsApi(client));
        ofKeys(new KeysApi(client));
        ofVolumes(new VolumesApi(client), quotas);
        say("live", health.live());
        say("is_ready", health.isReady());
        say("scrape", health.scrape());
        quotas.deleteQuotas(ENTITY, null, null, null);
        say("delete_quotas", null);
        System.out.println(mapper.writeValueAsString(SAID));
    }
}
