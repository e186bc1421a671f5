package main

import (
	"context"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/plain"
)

type franz struct{ client *kgo.Client }

func newFranz(to login, name string) (producer, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(to.bootstrap),
		kgo.ClientID(name),
		// By default franz-go compresses, and would send fewer bytes than a test says.
		kgo.ProducerBatchCompression(kgo.NoCompression()),
		kgo.SASL(plain.Auth{User: to.user, Pass: to.password}.AsMechanism()),
	)
	return franz{client}, err
}

func (f franz) send(topic string, value []byte, done func(error)) {
	record := &kgo.Record{Topic: topic, Value: value}
	f.client.Produce(context.Background(), record, func(_ *kgo.Record, err error) { done(err) })
}
