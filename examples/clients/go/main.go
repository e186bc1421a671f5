// Puts a quota, asks until throttled, reads the error of a bad ask, and deletes the quota.
// An overloaded node refuses an ask with 503, and charges nothing; decide asks again after its Retry-After.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math/rand"
	"net/http"
	"os"
	"strconv"
	"time"

	quotagate "quotagate.example/clients/quotagate"
)

const (
	who    = "example-go"
	entity = "user=" + who + ",client-id=*"

	overloaded = "urn:quotagate:overloaded"
)

func main() {
	ctx := context.WithValue(context.Background(), quotagate.ContextAccessToken, os.Getenv("QUOTAGATE_KEY"))
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

// decide asks for a decision, and asks an overloaded node again up to `times` times, a little after its Retry-After.
func decide(ctx context.Context, client *quotagate.APIClient, ask quotagate.Ask, times int) (*quotagate.Decision, error) {
	for {
		said, response, err := client.DecisionsAPI.DecideOneAsk(ctx).Ask(ask).Execute()
		if err == nil || times == 0 || !isOverloaded(response, err) {
			return said, err
		}
		times--
		seconds, err := strconv.Atoi(response.Header.Get("Retry-After"))
		if err != nil {
			seconds = 1
		}
		time.Sleep(time.Duration(float64(seconds) * (1 + rand.Float64()/10) * float64(time.Second)))
	}
}

func isOverloaded(response *http.Response, err error) bool {
	var refused *quotagate.GenericOpenAPIError
	if response == nil || response.StatusCode != http.StatusServiceUnavailable || !errors.As(err, &refused) {
		return false
	}
	var problem struct{ Type string }
	return json.Unmarshal(refused.Body(), &problem) == nil && problem.Type == overloaded
}

func run(ctx context.Context) error {
	url := os.Getenv("QUOTAGATE_URL")
	if url == "" {
		url = "http://127.0.0.1:8080"
	}
	configuration := quotagate.NewConfiguration()
	configuration.Servers = quotagate.ServerConfigurations{{URL: url}}
	client := quotagate.NewAPIClient(configuration)

	three := quotagate.NewQuota(0.1)
	three.SetAlgorithm("token_bucket")
	three.SetBurst(3)
	three.SetEnforcement("deny")
	put, _, err := client.QuotasAPI.PutQuotas(ctx, entity).QuotaSet(quotagate.QuotaSet{RequestRate: three}).Execute()
	if err != nil {
		return err
	}
	fmt.Println("put", put.GetEntity())

	ask := quotagate.NewAsk(quotagate.Usage{Requests: quotagate.PtrInt64(1)})
	ask.SetPrincipal(who)
	ask.SetClientId("app")
	admitted := 0
	said, err := decide(ctx, client, *ask, 3)
	for err == nil && said.GetDecision() == "admit" && admitted < 100 {
		admitted++
		said, err = decide(ctx, client, *ask, 3)
	}
	if err != nil {
		return err
	}
	fmt.Printf("admitted %d times, then %s\n", admitted, said.GetDecision())

	bad := quotagate.NewAsk(quotagate.Usage{Requests: quotagate.PtrInt64(-1)})
	_, _, err = client.DecisionsAPI.DecideOneAsk(ctx).Ask(*bad).Execute()
	var refused *quotagate.GenericOpenAPIError
	if errors.As(err, &refused) {
		if problem, ok := refused.Model().(quotagate.Problem); ok {
			fmt.Println("a bad ask:", problem.GetErrors()[0].GetField())
		}
	}

	if _, err := client.QuotasAPI.DeleteQuotas(ctx, entity).Execute(); err != nil {
		return err
	}
	fmt.Println("deleted")
	return nil
}
