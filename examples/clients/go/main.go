// Puts a quota, asks until throttled, reads what is wrong with a bad ask, and deletes the quota.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	quotagate "quotagate.example/clients/quotagate"
)

const (
	who    = "example-go"
	entity = "user=" + who + ",client-id=*"
)

func main() {
	ctx := context.WithValue(context.Background(), quotagate.ContextAccessToken, os.Getenv("QUOTAGATE_KEY"))
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
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
	said, _, err := client.DecisionsAPI.DecideOneAsk(ctx).Ask(*ask).Execute()
	for err == nil && said.GetDecision() == "admit" && admitted < 100 {
		admitted++
		said, _, err = client.DecisionsAPI.DecideOneAsk(ctx).Ask(*ask).Execute()
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
