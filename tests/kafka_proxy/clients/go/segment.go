package main

import (
	"context"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl/plain"
)

// segment is kafka-go, which has no idempotent producer.
type segment struct{ writer *kafka.Writer }

func newSegment(to login, name string) (producer, error) {
	return segment{&kafka.Writer{
		Addr:         kafka.TCP(to.bootstrap),
		RequiredAcks: kafka.RequireAll,
		BatchTimeout: 10 * time.Millisecond,
		Transport: &kafka.Transport{
			ClientID: name,
			SASL:     plain.Mechanism{Username: to.user, Password: to.password},
		},
	}}, nil
}

func (s segment) send(topic string, value []byte, done func(error)) {
	go func() {
		message := kafka.Message{Topic: topic, Value: value}
		done(s.writer.WriteMessages(context.Background(), message))
	}()
}
