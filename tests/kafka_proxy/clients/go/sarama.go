package main

import "github.com/IBM/sarama"

type saramas struct{ producer sarama.AsyncProducer }

func newSarama(to login, name string) (producer, error) {
	config := sarama.NewConfig()
	config.ClientID = name
	config.Net.SASL.Enable = true
	config.Net.SASL.User = to.user
	config.Net.SASL.Password = to.password
	config.Producer.Idempotent = true
	// sarama demands these settings of an idempotent producer.
	config.Net.MaxOpenRequests = 1
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Return.Successes = true
	made, err := sarama.NewAsyncProducer([]string{to.bootstrap}, config)
	if err != nil {
		return nil, err
	}
	go func() {
		for message := range made.Successes() {
			message.Metadata.(func(error))(nil)
		}
	}()
	go func() {
		for failed := range made.Errors() {
			failed.Msg.Metadata.(func(error))(failed.Err)
		}
	}()
	return saramas{made}, nil
}

func (s saramas) send(topic string, value []byte, done func(error)) {
	s.producer.Input() <- &sarama.ProducerMessage{
		Topic:    topic,
		Value:    sarama.ByteEncoder(value),
		Metadata: done,
	}
}
