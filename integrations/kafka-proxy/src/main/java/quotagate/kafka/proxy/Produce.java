// The usage of a produce request, and the answer to a refused request.
package quotagate.kafka.proxy;

import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.message.ProduceRequestData;
import org.apache.kafka.common.message.ProduceRequestData.PartitionProduceData;
import org.apache.kafka.common.message.ProduceRequestData.TopicProduceData;
import org.apache.kafka.common.message.ProduceResponseData;
import org.apache.kafka.common.message.ProduceResponseData.PartitionProduceResponse;
import org.apache.kafka.common.message.ProduceResponseData.TopicProduceResponse;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.record.MemoryRecords;
import org.apache.kafka.common.record.RecordBatch;

/**
 * A produce request.
 *
 * @param bytes the bytes of its records
 * @param ids the producer ids in it
 * @param batches the batches that have a producer id and a sequence
 */
record Produce(long bytes, Set<Long> ids, List<Batches.Batch> batches) {
  static Produce of(ProduceRequestData request) {
    long bytes = 0;
    Set<Long> ids = new LinkedHashSet<>();
    List<Batches.Batch> batches = new ArrayList<>();
    for (TopicProduceData topic : request.topicData()) {
      for (PartitionProduceData partition : topic.partitionData()) {
        if (partition.records() instanceof MemoryRecords records) {
          bytes += records.sizeInBytes();
          read(records, topic.name(), partition.index(), ids, batches);
        }
      }
    }
    return new Produce(bytes, ids, batches);
  }

  private static void read(
      MemoryRecords records,
      String topic,
      int partition,
      Set<Long> ids,
      List<Batches.Batch> batches) {
    try {
      for (RecordBatch batch : records.batches()) {
        if (batch.producerId() != RecordBatch.NO_PRODUCER_ID) {
          ids.add(batch.producerId());
        }
        if (batch.hasProducerId() && batch.baseSequence() != RecordBatch.NO_SEQUENCE) {
          var stream = new Batches.Stream(batch.producerId(), topic, partition);
          batches.add(new Batches.Batch(stream, batch.producerEpoch(), batch.baseSequence()));
        }
      }
    } catch (KafkaException e) {
      // The broker refuses unreadable records, and keeps no producer id of them.
    }
  }

  /** An answer with this error on every partition. */
  static ProduceResponseData refused(
      ProduceRequestData request, Errors error, String message, int throttleMs) {
    var response = new ProduceResponseData().setThrottleTimeMs(throttleMs);
    for (TopicProduceData topic : request.topicData()) {
      var answer = new TopicProduceResponse().setName(topic.name());
      for (PartitionProduceData partition : topic.partitionData()) {
        answer
            .partitionResponses()
            .add(
                new PartitionProduceResponse()
                    .setIndex(partition.index())
                    .setErrorCode(error.code())
                    .setErrorMessage(message)
                    .setBaseOffset(-1)
                    .setLogAppendTimeMs(RecordBatch.NO_TIMESTAMP)
                    .setLogStartOffset(-1));
      }
      response.responses().add(answer);
    }
    return response;
  }
}
