// The bytes of a fetch response, and the answer to a fetch that has to wait or is refused.
package quotagate.kafka.proxy;

import java.util.ArrayList;
import java.util.List;
import org.apache.kafka.common.message.FetchRequestData;
import org.apache.kafka.common.message.FetchRequestData.FetchPartition;
import org.apache.kafka.common.message.FetchRequestData.FetchTopic;
import org.apache.kafka.common.message.FetchResponseData;
import org.apache.kafka.common.message.FetchResponseData.FetchableTopicResponse;
import org.apache.kafka.common.message.FetchResponseData.PartitionData;
import org.apache.kafka.common.message.ShareFetchResponseData;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.record.BaseRecords;
import org.apache.kafka.common.record.MemoryRecords;

/** Fetch requests and responses. */
final class Fetch {
  private Fetch() {}

  /** Bytes of records in a response. */
  static long bytes(ApiMessage response) {
    long bytes = 0;
    if (response instanceof FetchResponseData fetched) {
      for (FetchableTopicResponse topic : fetched.responses()) {
        for (PartitionData partition : topic.partitions()) {
          bytes += size(partition.records());
        }
      }
    } else if (response instanceof ShareFetchResponseData fetched) {
      for (var topic : fetched.responses()) {
        for (var partition : topic.partitions()) {
          bytes += size(partition.records());
        }
      }
    }
    return bytes;
  }

  private static long size(BaseRecords records) {
    return records == null ? 0 : records.sizeInBytes();
  }

  /**
   * An answer without records.
   *
   * <p>An empty answer to a full fetch is how a broker itself throttles (KIP-219). A request within
   * a fetch session brings changes that the broker would never see, so the client has to begin the
   * session anew, which it does with a full fetch.
   */
  static FetchResponseData empty(FetchRequestData request, int throttleMs) {
    var response = new FetchResponseData().setThrottleTimeMs(throttleMs);
    return isIncremental(request)
        ? response
            .setErrorCode(Errors.INVALID_FETCH_SESSION_EPOCH.code())
            .setSessionId(request.sessionId())
        : response;
  }

  /** An answer with this error on every partition. */
  static FetchResponseData refused(FetchRequestData request, Errors error) {
    if (isIncremental(request)) {
      return empty(request, 0); // the full fetch that follows names all partitions
    }
    List<FetchableTopicResponse> topics = new ArrayList<>();
    for (FetchTopic topic : request.topics()) {
      List<PartitionData> partitions = new ArrayList<>();
      for (FetchPartition partition : topic.partitions()) {
        partitions.add(
            new PartitionData()
                .setPartitionIndex(partition.partition())
                .setErrorCode(error.code())
                .setHighWatermark(-1)
                .setRecords(MemoryRecords.EMPTY));
      }
      topics.add(
          new FetchableTopicResponse()
              .setTopic(topic.topic())
              .setTopicId(topic.topicId())
              .setPartitions(partitions));
    }
    return new FetchResponseData().setResponses(topics);
  }

  /**
   * Whether a request names only changes since the last request: epochs of sessions count from 1.
   */
  private static boolean isIncremental(FetchRequestData request) {
    return request.sessionEpoch() > 0;
  }
}
