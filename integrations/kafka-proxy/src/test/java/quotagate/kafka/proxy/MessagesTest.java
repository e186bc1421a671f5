// The usage of requests, and the answers to requests that are not forwarded.
package quotagate.kafka.proxy;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;

import java.util.List;
import java.util.Set;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.message.CreatePartitionsRequestData;
import org.apache.kafka.common.message.CreatePartitionsRequestData.CreatePartitionsTopic;
import org.apache.kafka.common.message.CreatePartitionsRequestData.CreatePartitionsTopicCollection;
import org.apache.kafka.common.message.CreateTopicsRequestData;
import org.apache.kafka.common.message.CreateTopicsRequestData.CreatableTopic;
import org.apache.kafka.common.message.CreateTopicsRequestData.CreatableTopicCollection;
import org.apache.kafka.common.message.DeleteTopicsRequestData;
import org.apache.kafka.common.message.DeleteTopicsRequestData.DeleteTopicState;
import org.apache.kafka.common.message.FetchRequestData;
import org.apache.kafka.common.message.MetadataResponseData;
import org.apache.kafka.common.message.MetadataResponseData.MetadataResponsePartition;
import org.apache.kafka.common.message.MetadataResponseData.MetadataResponseTopic;
import org.apache.kafka.common.message.ProduceRequestData;
import org.apache.kafka.common.message.ProduceRequestData.PartitionProduceData;
import org.apache.kafka.common.message.ProduceRequestData.TopicProduceData;
import org.apache.kafka.common.message.ProduceRequestData.TopicProduceDataCollection;
import org.apache.kafka.common.message.ProduceResponseData;
import org.apache.kafka.common.message.SaslHandshakeResponseData;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.record.MemoryRecords;
import org.apache.kafka.common.record.SimpleRecord;
import org.junit.jupiter.api.Test;

class MessagesTest {
  private static ProduceRequestData produce(MemoryRecords... records) {
    var topic = new TopicProduceData().setName("t");
    for (int index = 0; index < records.length; index++) {
      topic
          .partitionData()
          .add(new PartitionProduceData().setIndex(index).setRecords(records[index]));
    }
    return new ProduceRequestData()
        .setTopicData(new TopicProduceDataCollection(List.of(topic).iterator()));
  }

  @Test
  void produceSpendsBytesAndIds() {
    var plain = MemoryRecords.withRecords(Compression.NONE, new SimpleRecord(new byte[100]));
    var idempotent =
        MemoryRecords.withIdempotentRecords(
            Compression.NONE, 4711L, (short) 3, 9, new SimpleRecord(new byte[100]));
    Produce found = Produce.of(produce(plain, idempotent, null));
    assertEquals(plain.sizeInBytes() + idempotent.sizeInBytes(), found.bytes());
    assertEquals(Set.of(4711L), found.ids());
    assertEquals(
        List.of(new Batches.Batch(new Batches.Stream(4711L, "t", 1), (short) 3, 9)),
        found.batches());
  }

  @Test
  void refusalNamesEveryPartition() {
    var records = MemoryRecords.withRecords(Compression.NONE, new SimpleRecord(new byte[1]));
    var response =
        Produce.refused(produce(records, records), Errors.NOT_ENOUGH_REPLICAS, "why", 1_500);
    assertEquals(1_500, response.throttleTimeMs());
    var partitions = response.responses().find("t").partitionResponses();
    assertEquals(2, partitions.size());
    partitions.forEach(each -> assertEquals(19, each.errorCode()));
  }

  @Test
  void incrementalFetchIsToldToBeginAnew() {
    var full = Fetch.empty(new FetchRequestData().setSessionEpoch(0), 500);
    assertEquals(0, full.errorCode());
    assertEquals(500, full.throttleTimeMs());
    var incremental = Fetch.empty(new FetchRequestData().setSessionId(9).setSessionEpoch(4), 500);
    assertEquals(Errors.INVALID_FETCH_SESSION_EPOCH.code(), incremental.errorCode());
    assertEquals(9, incremental.sessionId());
  }

  private static MetadataResponseTopic known(String name, Uuid id, int partitions) {
    var topic = new MetadataResponseTopic().setName(name).setTopicId(id);
    for (int index = 0; index < partitions; index++) {
      topic.partitions().add(new MetadataResponsePartition());
    }
    return topic;
  }

  @Test
  void mutationsCountPartitions() {
    var nothing = new MetadataResponseData();
    var topics = new CreatableTopicCollection();
    topics.add(new CreatableTopic().setName("three").setNumPartitions(3));
    topics.add(new CreatableTopic().setName("default").setNumPartitions(-1));
    var creation = new CreateTopicsRequestData().setTopics(topics);
    assertNull(Mutations.unknown(creation));
    assertEquals(4, Mutations.count(creation, nothing));
    assertEquals(0, Mutations.count(creation.setValidateOnly(true), nothing));

    Uuid id = Uuid.randomUuid();
    var metadata = new MetadataResponseData();
    metadata.topics().add(known("a", id, 5));
    metadata.topics().add(known("b", Uuid.randomUuid(), 2));
    var deletion =
        new DeleteTopicsRequestData()
            .setTopics(
                List.of(
                    new DeleteTopicState().setTopicId(id),
                    new DeleteTopicState().setName("b"),
                    new DeleteTopicState().setName("unknown")));
    assertEquals(3, Mutations.unknown(deletion).topics().size());
    assertEquals(8, Mutations.count(deletion, metadata));

    var more = new CreatePartitionsTopicCollection();
    more.add(new CreatePartitionsTopic().setName("a").setCount(9));
    assertEquals(4, Mutations.count(new CreatePartitionsRequestData().setTopics(more), metadata));
  }

  @Test
  void throttleTimeIsOnlyRaised() {
    var response = new ProduceResponseData().setThrottleTimeMs(100);
    ThrottleTimes.raise(response, 50);
    assertEquals(100, response.throttleTimeMs());
    ThrottleTimes.raise(response, Long.MAX_VALUE);
    assertEquals(Integer.MAX_VALUE, response.throttleTimeMs());
    ThrottleTimes.raise(new SaslHandshakeResponseData(), 50); // has none
  }
}
