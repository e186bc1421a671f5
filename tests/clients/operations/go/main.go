// Calls every operation with the generated Go client, and prints each answer as it would send it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"

	quotagate "quotagate.example/clients/quotagate"
)

const (
	who    = "operations-go"
	entity = "user=" + who
)

var said [][2]any

// say notes an answer as the client would send it; an error ends the program.
func say[T any](operation string) func(T, *http.Response, error) T {
	return func(answer T, _ *http.Response, err error) T {
		check(operation, err)
		said = append(said, [2]any{operation, answer})
		return answer
	}
}

func sayNothing(operation string) func(*http.Response, error) {
	return func(_ *http.Response, err error) {
		check(operation, err)
		said = append(said, [2]any{operation, nil})
	}
}

func check(operation string, err error) {
	var refused *quotagate.GenericOpenAPIError
	if errors.As(err, &refused) {
		log.Fatalf("%s: %v: %s", operation, err, refused.Body())
	}
	if err != nil {
		log.Fatalf("%s: %v", operation, err)
	}
}

// ofQuotas sends back the quotas that were read, patches, and reads the history and the shadow quotas.
func ofQuotas(ctx context.Context, quotas *quotagate.QuotasAPIService) {
	rate := quotagate.NewQuota(16_777_217.5)
	rate.SetBurst(3e9)
	rate.SetAlgorithm("token_bucket")
	rate.SetEnforcement("deny")
	ids := quotagate.NewQuota(5)
	ids.SetLayers(map[string]int64{"interval_ms": 3_600_000, "ttl_ms": 7_200_000})
	fetched := quotagate.NewQuota(2_147_483_649)
	fetched.SetShadow(true)
	wanted := quotagate.QuotaSet{
		RequestRate:      rate,
		ProducerByteRate: quotagate.NewQuota(9_007_199_254_740_991),
		ProducerIdsRate:  ids,
		ConsumerByteRate: fetched,
	}
	say[*quotagate.EntityQuotas]("put_quotas")(quotas.PutQuotas(ctx, entity).QuotaSet(wanted).XReason("the first").Execute())
	read := say[*quotagate.EntityQuotas]("get_quotas")(quotas.GetQuotas(ctx, entity).Execute())
	say[*quotagate.EntityQuotas]("put_quotas")(quotas.PutQuotas(ctx, entity).QuotaSet(read.GetQuotas()).Execute())
	say[*quotagate.ShadowQuotas]("shadow_quotas")(quotas.ShadowQuotas(ctx).Entity(entity).Execute())

	patched := quotagate.NewQuotaPatchRequestRate()
	patched.SetLimit(10)
	patched.SetBurstNil()
	bytes := quotagate.NewQuotaPatchProducerByteRate()
	bytes.SetLimit(8)
	patch := quotagate.NewQuotaPatch()
	patch.SetRequestRate(*patched)
	patch.SetConsumerByteRate(*bytes)
	patch.SetProducerIdsRateNil()
	say[*quotagate.EntityQuotas]("patch_quotas")(quotas.PatchQuotas(ctx, entity).QuotaPatch(*patch).Execute())

	page := say[*quotagate.QuotaPage]("list_quotas")(
		quotas.ListQuotas(ctx).Match([]string{entity}).Strict(true).Limit(10).Execute())
	history := say[*quotagate.QuotaHistory]("quotas_history")(quotas.QuotasHistory(ctx).Entity(entity).Execute())
	before := history.Changes[0].GetBefore()
	again := quotagate.QuotaSet{
		RequestRate:      before.RequestRate,
		ProducerByteRate: before.ProducerByteRate,
		ProducerIdsRate:  before.ProducerIdsRate,
		ConsumerByteRate: before.ConsumerByteRate,
	}
	say[*quotagate.EntityQuotas]("put_quotas")(quotas.PutQuotas(ctx, entity).QuotaSet(again).Execute())

	altered := quotagate.NewQuotaAlteration(entity, map[string]any{"request_rate": 7, "producer_byte_rate": nil})
	alterations := quotagate.NewQuotaAlterations([]quotagate.QuotaAlteration{*altered})
	say[*quotagate.QuotaResults]("alter_quotas")(quotas.AlterQuotas(ctx).QuotaAlterations(*alterations).Execute())

	found := page.Quotas[0]
	setting := quotagate.NewQuotaSettingQuotas()
	setting.SetRequestRate(found.Quotas.GetRequestRate())
	setting.SetProducerByteRate(found.Quotas.GetProducerByteRate())
	setting.SetConsumerByteRateNil()
	application := quotagate.NewQuotaApplication([]quotagate.QuotaSetting{*quotagate.NewQuotaSetting(found.Entity, *setting)})
	application.SetValidateOnly(true)
	say[*quotagate.QuotaPlan]("apply_quotas")(quotas.ApplyQuotas(ctx).QuotaApplication(*application).Execute())
	say[*quotagate.EffectiveQuotas]("effective_quotas")(quotas.EffectiveQuotas(ctx).Principal(who).Execute())
}

// ofDecisions decides, takes a lease, and looks at the buckets.
func ofDecisions(ctx context.Context, client *quotagate.APIClient) {
	usage := quotagate.Usage{Requests: quotagate.PtrInt64(1), ProducerIds: []string{"123", "9223372036854775807"}}
	ask := quotagate.NewAsk(usage)
	ask.SetPrincipal(who)
	ask.SetDetail(true)
	decisions := client.DecisionsAPI
	say[*quotagate.Decision]("decide_one_ask")(decisions.DecideOneAsk(ctx).Ask(*ask).Execute())
	other := quotagate.NewAsk(quotagate.Usage{Requests: quotagate.PtrInt64(1)})
	batch := quotagate.NewBatch([]quotagate.Ask{*ask, *other})
	say[*quotagate.Decisions]("decide_a_batch_of_asks")(decisions.DecideABatchOfAsks(ctx).Batch(*batch).Execute())
	say[*quotagate.Decision]("check_by_get")(decisions.CheckByGet(ctx).XQuotagatePrincipal(who).Requests(1).Execute())

	wish := quotagate.NewWish(quotagate.LeaseUsage{Requests: quotagate.PtrInt64(1)})
	wish.SetPrincipal(who)
	leases := client.LeasesAPI
	lease := say[*quotagate.Lease]("take_lease")(
		leases.TakeLease(ctx).LeaseRequest(*quotagate.NewLeaseRequest(*wish, 10_000)).Execute())
	spent := quotagate.NewSpent(quotagate.LeaseUsage{Requests: quotagate.PtrInt64(0)})
	say[*quotagate.Settled]("end_lease")(leases.EndLease(ctx, lease.GetLease()).Spent(*spent).Execute())

	found := say[*quotagate.Buckets]("get_buckets")(client.BucketsAPI.GetBuckets(ctx).Bucket(entity).Execute())
	reset := quotagate.NewBucketReset(found.Buckets[0].Bucket)
	reset.SetQuota(found.Buckets[0].Quota)
	sayNothing("reset_bucket")(client.BucketsAPI.ResetBucket(ctx).BucketReset(*reset).Execute())
}

// ofReports lists reports, and reads the newest.
func ofReports(ctx context.Context, reports *quotagate.ReportsAPIService) {
	listed := say[*quotagate.ReportList]("get_reports")(reports.GetReports(ctx).Execute())
	say[*quotagate.Report]("get_report")(reports.GetReport(ctx, listed.Reports[0].Name).Execute())
}

// ofKeys makes, rotates and revokes a key.
func ofKeys(ctx context.Context, keys *quotagate.KeysAPIService) {
	wanted := quotagate.NewKeyWanted(who, []string{"decide"})
	wanted.SetBoundTo([]string{entity})
	wanted.SetExpiresMs(4_102_444_800_000)
	say[*quotagate.KeyOnce]("create_key")(keys.CreateKey(ctx).KeyWanted(*wanted).Execute())
	say[*quotagate.KeyList]("get_keys")(keys.GetKeys(ctx).Execute())
	rotation := quotagate.Rotation{GraceMs: quotagate.PtrInt64(1_000)}
	say[*quotagate.KeyOnce]("rotate_key")(keys.RotateKey(ctx, who).Rotation(rotation).Execute())
	sayNothing("revoke_key")(keys.RevokeKey(ctx, who).Execute())
}

// ofVolumes pushes volumes, reads them, pushes them again, and reads a drill in the history.
func ofVolumes(ctx context.Context, client *quotagate.APIClient) {
	none := *quotagate.NewNullableInt64(nil)
	total := *quotagate.NewNullableInt64(quotagate.PtrInt64(4_611_686_018_427_387_905))
	available := *quotagate.NewNullableInt64(quotagate.PtrInt64(9_007_199_254_740_993))
	push := func(each []quotagate.PushedVolumesVolumesInner) {
		pushed := quotagate.NewPushedVolumes(each)
		pushed.SetComplete(true)
		say[*quotagate.Volumes]("push_volumes")(client.VolumesAPI.PushVolumes(ctx).PushedVolumes(*pushed).Execute())
	}
	push([]quotagate.PushedVolumesVolumesInner{
		*quotagate.NewPushedVolumesVolumesInner("1", "/a", total, available),
		*quotagate.NewPushedVolumesVolumesInner("1", "/b", none, none),
	})
	read := say[*quotagate.Volumes]("get_volumes")(client.VolumesAPI.GetVolumes(ctx).Execute())
	var again []quotagate.PushedVolumesVolumesInner
	for _, each := range read.Volumes {
		again = append(again,
			*quotagate.NewPushedVolumesVolumesInner(each.Broker, each.Dir, each.TotalBytes, each.AvailableBytes))
	}
	push(again)
	sayNothing("forget_volumes")(client.VolumesAPI.ForgetVolumes(ctx).Broker("1").Execute())
	drill := quotagate.NewDrillWanted(0.5, 600_000)
	say[*quotagate.Volumes]("begin_drill")(client.VolumesAPI.BeginDrill(ctx).DrillWanted(*drill).Execute())
	sayNothing("end_drill")(client.VolumesAPI.EndDrill(ctx).XReason("over").Execute())
	say[*quotagate.QuotaHistory]("quotas_history")(
		client.QuotasAPI.QuotasHistory(ctx).Entity("throttle_factor").Limit(2).Execute())
}

func main() {
	ctx := context.WithValue(context.Background(), quotagate.ContextAccessToken, os.Getenv("QUOTAGATE_KEY"))
	configuration := quotagate.NewConfiguration()
	configuration.Servers = quotagate.ServerConfigurations{{URL: os.Getenv("QUOTAGATE_URL")}}
	client := quotagate.NewAPIClient(configuration)
	ofQuotas(ctx, client.QuotasAPI)
	ofDecisions(ctx, client)
	say[*quotagate.Overview]("get_overview")(
		client.OverviewAPI.GetOverview(ctx).Resolution("second").SinceMs(1).Execute())
	ofReports(ctx, client.ReportsAPI)
	ofKeys(ctx, client.KeysAPI)
	ofVolumes(ctx, client)
	say[*quotagate.Health]("live")(client.HealthAPI.Live(ctx).Execute())
	say[*quotagate.Health]("is_ready")(client.HealthAPI.IsReady(ctx).Execute())
	say[string]("scrape")(client.HealthAPI.Scrape(ctx).Execute())
	sayNothing("delete_quotas")(client.QuotasAPI.DeleteQuotas(ctx, entity).Execute())
	printed, err := json.Marshal(said)
	check("printing", err)
	fmt.Println(string(printed))
}
