// Idempotent producers of kafkajs that tests drive line by line: `node main.mjs BOOTSTRAP USER PASSWORD`.
//
// The commands and the outcomes are those of ../go/main.go, and one more: `burst NAME TOPIC BYTES COUNT` sends so many
// records at once, each in a request of its own, by a producer as the library makes it, which has no id.
import { createInterface } from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'
import kafkajs from 'kafkajs'

const [bootstrap, username, password] = process.argv.slice(2)
const TOGETHER = 100
const senders = new Map()

function say(...words) {
  console.log(words.join(' ').replaceAll('\n', ' '))
}

class Sender {
  count = 0
  #name
  #producer
  #connected
  #last = Promise.resolve()

  constructor(name, idempotent) {
    this.#name = name
    const kafka = new kafkajs.Kafka({
      brokers: [bootstrap],
      clientId: name,
      sasl: { mechanism: 'plain', username, password },
      logLevel: kafkajs.logLevel.ERROR,
      logCreator: () => ({ log }) => console.error(JSON.stringify(log)),
    })
    // kafkajs demands this of an idempotent producer, which then retries without end by default. 5 is the
    // library's usual number of retries.
    this.#producer = kafka.producer({
      createPartitioner: kafkajs.Partitioners.DefaultPartitioner,
      ...(idempotent ? { idempotent, maxInFlightRequests: 1, retry: { retries: 5 } } : {}),
    })
    this.#connected = this.#producer.connect()
  }

  // Commands of one producer run one after the other.
  run(words) {
    this.#last = this.#last.then(() => this.#run(words))
  }

  async #run([command, name, topic, bytes, ...numbers]) {
    await this.#connected
    const [amount, seconds] = numbers.map(Number)
    if (command === 'send') {
      await this.#send(topic, Array.from({ length: amount }, () => this.#value(bytes)))
      return
    }
    if (command === 'burst') {
      const before = this.count
      await Promise.all(Array.from({ length: amount }, () => this.#send(topic, [this.#value(bytes)])))
      say('pushed', name, this.count - before)
      return
    }
    // A call of send is one request: records that became due during the last one go together, up to a bound.
    const began = Date.now()
    const before = this.count
    for (let elapsed = 0; elapsed < seconds * 1000; elapsed = Date.now() - began) {
      const due = Math.ceil((amount * elapsed) / 1000) - (this.count - before)
      const values = Array.from({ length: Math.min(due, TOGETHER) }, () => this.#value(bytes))
      if (values.length) await this.#send(topic, values)
      else await sleep(10)
    }
    say('pushed', name, this.count - before)
  }

  #value(bytes) {
    return `${this.#name}:${this.count++}`.padEnd(Number(bytes))
  }

  async #send(topic, values) {
    try {
      await this.#producer.send({ topic, messages: values.map((value) => ({ value })) })
      for (const _ of values) say('sent', this.#name)
    } catch (error) {
      for (const _ of values) say('error', this.#name, error)
    }
  }
}

say('ready')
for await (const line of createInterface({ input: process.stdin })) {
  const words = line.split(' ')
  if (!senders.has(words[1])) senders.set(words[1], new Sender(words[1], words[0] !== 'burst'))
  senders.get(words[1]).run(words)
}
process.exit(0)
