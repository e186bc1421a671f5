// Idempotent producers of franz-go, sarama and kafka-go that tests drive line by line.
//
//	go-clients (franz-go|sarama|kafka-go) BOOTSTRAP USER PASSWORD
//
// Each line of standard input is a command:
//
//	send NAME TOPIC BYTES COUNT          so many records, by the producer of this name
//	push NAME TOPIC BYTES RATE SECONDS   records at even intervals; then "pushed NAME COUNT"
//
// A record's value is "NAME:NUMBER", filled up with blanks. Each outcome is a line: "sent NAME" or
// "error NAME WHY". A producer is made when it first sends, with the library's own timeouts and
// retries.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// producer is one producer of a library.
type producer interface {
	// send hands a record over; done is called once, with the outcome.
	send(topic string, value []byte, done func(error))
}

// login has the addresses of brokers, and the user and password for SASL/PLAIN.
type login struct{ bootstrap, user, password string }

// libraries make a producer with this client id.
var libraries = map[string]func(to login, name string) (producer, error){
	"franz-go": newFranz,
	"sarama":   newSarama,
	"kafka-go": newSegment,
}

var output sync.Mutex

func say(words ...any) {
	output.Lock()
	defer output.Unlock()
	fmt.Println(words...)
}

// sender is a producer with its name and its commands, which run one after the other.
type sender struct {
	name     string
	producer producer
	commands chan []string
	count    int
}

func (s *sender) record(topic string, bytes int) {
	value := fmt.Sprintf("%-*s", bytes, fmt.Sprintf("%s:%d", s.name, s.count))
	s.count++
	s.producer.send(topic, []byte(value), func(err error) {
		if err != nil {
			say("error", s.name, strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			say("sent", s.name)
		}
	})
}

func (s *sender) run() {
	for words := range s.commands {
		bytes := number(words[3])
		if words[0] == "send" {
			for range number(words[4]) {
				s.record(words[2], bytes)
			}
			continue
		}
		began, before := time.Now(), s.count
		lasts := time.Duration(number(words[5])) * time.Second
		interval := time.Second / time.Duration(number(words[4]))
		// A library that has no room for a record lets it wait, so that fewer are sent.
		for due := time.Duration(0); due < lasts && time.Since(began) < lasts; due += interval {
			time.Sleep(time.Until(began.Add(due)))
			s.record(words[2], bytes)
		}
		say("pushed", s.name, s.count-before)
	}
}

func number(word string) int {
	found, err := strconv.Atoi(word)
	if err != nil {
		panic(err)
	}
	return found
}

func main() {
	library, to := libraries[os.Args[1]], login{os.Args[2], os.Args[3], os.Args[4]}
	senders := map[string]*sender{}
	say("ready")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		name := words[1]
		if senders[name] == nil {
			made := &sender{name: name, commands: make(chan []string, 16)}
			senders[name] = made
			go func() {
				var err error
				if made.producer, err = library(to, name); err != nil {
					say("error", name, err)
					return
				}
				made.run()
			}()
		}
		senders[name].commands <- words
	}
}
