// A program with Kafka's own client that tests drive line by line: idempotent producers, consumers,
// topics.
package quotagate.kafka.proxy;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * {@code JavaClient PROPERTIES}; each line of standard input is a command, and every outcome is a
 * line:
 *
 * <ul>
 *   <li>{@code send NAME TOPIC BYTES COUNT}: by the producer of this name, which is made if it is
 *       new; then {@code sent NAME} or {@code error NAME CLASS MESSAGE} for each record
 *   <li>{@code transaction NAME TOPIC BYTES COUNT}: likewise in a transaction; then {@code
 *       committed NAME}
 *   <li>{@code push NAME TOPIC BYTES RATE SECONDS}: records at even intervals, or without a pause
 *       if the rate is 0; then {@code pushed NAME COUNT PER_SECOND P50 P99 MAX}, the last three in
 *       ms from when a record was due to when it was acknowledged
 *   <li>{@code metric NAME METRIC}: {@code metric NAME VALUE}
 *   <li>{@code producers TOPIC}: {@code producers ID:EPOCH ...}, as the broker knows them
 *   <li>{@code fetch TOPIC COUNT}: {@code fetched COUNT THROTTLE} when as many records have come
 *   <li>{@code create TOPIC PARTITIONS}: {@code created TOPIC}, or {@code error TOPIC CLASS
 *       MESSAGE}
 * </ul>
 */
public final class JavaClient {
  private final Properties properties = new Properties();
  private final Map<String, KafkaProducer<byte[], byte[]>> producers = new HashMap<>();

  private JavaClient() {}

  public static void main(String[] arguments) throws Exception {
    var client = new JavaClient();
    try (var file = Files.newBufferedReader(Path.of(arguments[0]))) {
      client.properties.load(file);
    }
    var input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    say("ready");
    for (String line = input.readLine(); line != null; line = input.readLine()) {
      String[] words = line.split(" ", -1);
      try {
        client.run(words);
      } catch (ExecutionException e) {
        say("error " + words[1] + " " + described(e.getCause()));
      } catch (RuntimeException e) {
        say("error " + words[1] + " " + described(e));
      }
    }
    client.producers.values().forEach(producer -> producer.close(Duration.ZERO));
  }

  private void run(String[] words) throws ExecutionException, InterruptedException {
    switch (words[0]) {
      case "send" -> send(words);
      case "transaction" -> {
        KafkaProducer<byte[], byte[]> producer = producer(words[1], true);
        producer.beginTransaction();
        send(words);
        producer.commitTransaction();
        say("committed " + words[1]);
      }
      case "push" -> push(words);
      case "metric" ->
          producers
              .get(words[1])
              .metrics()
              .forEach(
                  (name, metric) -> {
                    if (name.name().equals(words[2]) && name.group().equals("producer-metrics")) {
                      say("metric " + words[1] + " " + metric.metricValue());
                    }
                  });
      case "producers" -> describe(words[1]);
      case "fetch" -> fetch(words[1], Integer.parseInt(words[2]));
      case "create" -> {
        try (var admin = Admin.create(properties)) {
          var topic = new NewTopic(words[1], Integer.parseInt(words[2]), (short) 1);
          admin.createTopics(List.of(topic)).all().get();
        }
        say("created " + words[1]);
      }
      default -> throw new IllegalArgumentException(words[0]);
    }
  }

  private KafkaProducer<byte[], byte[]> producer(String name, boolean transactional) {
    return producers.computeIfAbsent(
        name,
        ignored -> {
          var own = new Properties();
          own.putAll(properties);
          if (transactional) {
            own.put("transactional.id", name);
          }
          var made = new KafkaProducer<>(own, new ByteArraySerializer(), new ByteArraySerializer());
          if (transactional) {
            made.initTransactions();
          }
          return made;
        });
  }

  private void send(String[] words) {
    KafkaProducer<byte[], byte[]> producer = producer(words[1], false);
    for (int number = 0; number < Integer.parseInt(words[4]); number++) {
      producer.send(
          new ProducerRecord<>(words[2], new byte[Integer.parseInt(words[3])]),
          (metadata, failure) ->
              say(
                  failure == null
                      ? "sent " + words[1]
                      : "error " + words[1] + " " + described(failure)));
    }
  }

  private void push(String[] words) {
    KafkaProducer<byte[], byte[]> producer = producer(words[1], false);
    var value = new byte[Integer.parseInt(words[3])];
    double rate = Double.parseDouble(words[4]);
    long lasts = (long) (Double.parseDouble(words[5]) * 1e9);
    List<Long> waits = Collections.synchronizedList(new ArrayList<>());
    long began = System.nanoTime();
    for (long number = 0; System.nanoTime() - began < lasts; number++) {
      // A record that could not leave when it was due has waited since then.
      long due = rate == 0 ? System.nanoTime() : began + (long) (number * 1e9 / rate);
      if (due - began >= lasts) {
        break;
      }
      while (System.nanoTime() < due) {
        LockSupport.parkNanos(due - System.nanoTime());
      }
      producer.send(
          new ProducerRecord<>(words[2], value),
          (metadata, failure) -> {
            if (failure == null) {
              waits.add(System.nanoTime() - due);
            } else {
              say("error " + words[1] + " " + described(failure));
            }
          });
    }
    producer.flush();
    double seconds = (System.nanoTime() - began) / 1e9;
    List<Long> sorted = waits.stream().sorted().toList();
    int last = sorted.size() - 1;
    var found = new StringBuilder("pushed " + words[1] + " " + sorted.size());
    found.append(' ').append(sorted.size() / seconds);
    for (int at : List.of(last / 2, (int) (last * 0.99), last)) {
      found.append(' ').append(sorted.get(at) / 1e6);
    }
    say(found.toString());
  }

  private void describe(String topic) throws ExecutionException, InterruptedException {
    var partition = new TopicPartition(topic, 0);
    try (var admin = Admin.create(properties)) {
      var states = admin.describeProducers(List.of(partition)).partitionResult(partition).get();
      var known = new StringBuilder("producers");
      for (var state : states.activeProducers()) {
        known.append(' ').append(state.producerId()).append(':').append(state.producerEpoch());
      }
      say(known.toString());
    }
  }

  private void fetch(String topic, int count) {
    try (var consumer =
        new KafkaConsumer<>(properties, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
      var partition = new TopicPartition(topic, 0);
      consumer.assign(List.of(partition));
      consumer.seekToBeginning(List.of(partition));
      int fetched = 0;
      while (fetched < count) {
        fetched += consumer.poll(Duration.ofSeconds(1)).count();
      }
      double throttle =
          consumer.metrics().entrySet().stream()
              .filter(metric -> metric.getKey().name().equals("fetch-throttle-time-max"))
              .mapToDouble(metric -> (double) metric.getValue().metricValue())
              .max()
              .orElse(Double.NaN);
      say("fetched " + fetched + " " + throttle);
    }
  }

  private static String described(Throwable failure) {
    return failure.getClass().getSimpleName() + " " + failure.getMessage();
  }

  private static synchronized void say(String line) {
    System.out.println(line.replace('\n', ' '));
    System.out.flush();
  }
}
