// A program with Kafka's own client that tests drive line by line: idempotent producers, consumers,
// topics.
package quotagate.kafka.proxy;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
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
