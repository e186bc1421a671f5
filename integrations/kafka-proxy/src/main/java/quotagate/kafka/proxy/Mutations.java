// How many partitions a change of topics concerns, and the answer to a refused change.
package quotagate.kafka.proxy;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.message.CreatePartitionsRequestData;
import org.apache.kafka.common.message.CreatePartitionsResponseData;
import org.apache.kafka.common.message.CreatePartitionsResponseData.CreatePartitionsTopicResult;
import org.apache.kafka.common.message.CreateTopicsRequestData;
import org.apache.kafka.common.message.CreateTopicsResponseData;
import org.apache.kafka.common.message.CreateTopicsResponseData.CreatableTopicResult;
import org.apache.kafka.common.message.DeleteTopicsRequestData;
import org.apache.kafka.common.message.DeleteTopicsResponseData;
import org.apache.kafka.common.message.DeleteTopicsResponseData.DeletableTopicResult;
import org.apache.kafka.common.message.MetadataRequestData;
import org.apache.kafka.common.message.MetadataRequestData.MetadataRequestTopic;
import org.apache.kafka.common.message.MetadataResponseData;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.Errors;

/** CreateTopics, DeleteTopics and CreatePartitions. */
final class Mutations {
  private Mutations() {}

  /** Whether clients of this version know error 89 (KIP-599). */
  static boolean knowsError(ApiKeys kind, short version) {
    return switch (kind) {
      case CREATE_TOPICS -> version >= 6;
      case DELETE_TOPICS -> version >= 5;
      default -> version >= 3;
    };
  }

  /** A request for the metadata that the count needs; null if it needs none. */
  static MetadataRequestData unknown(ApiMessage request) {
    var topics = new ArrayList<MetadataRequestTopic>();
    if (request instanceof DeleteTopicsRequestData deletion) {
      deletion.topicNames().forEach(name -> topics.add(new MetadataRequestTopic().setName(name)));
      deletion
          .topics()
          .forEach(
              topic ->
                  topics.add(
                      new MetadataRequestTopic()
                          .setName(topic.name())
                          .setTopicId(topic.name() == null ? topic.topicId() : Uuid.ZERO_UUID)));
    } else if (request instanceof CreatePartitionsRequestData addition
        && !addition.validateOnly()) {
      addition
          .topics()
          .forEach(topic -> topics.add(new MetadataRequestTopic().setName(topic.name())));
    }
    return topics.isEmpty()
        ? null
        : new MetadataRequestData().setTopics(topics).setAllowAutoTopicCreation(false);
  }

  /** How many partitions a request creates, deletes or adds; 1 for each topic of unknown size. */
  static long count(ApiMessage request, MetadataResponseData known) {
    Map<Object, Integer> partitions = new HashMap<>();
    for (var topic : known.topics()) {
      if (topic.errorCode() == Errors.NONE.code()) {
        partitions.put(topic.name(), topic.partitions().size());
        partitions.put(topic.topicId(), topic.partitions().size());
      }
    }
    long count = 0;
    if (request instanceof CreateTopicsRequestData creation && !creation.validateOnly()) {
      for (var topic : creation.topics()) {
        int assigned = topic.assignments().size();
        count += assigned > 0 ? assigned : Math.max(1, topic.numPartitions());
      }
    } else if (request instanceof DeleteTopicsRequestData deletion) {
      for (String name : deletion.topicNames()) {
        count += partitions.getOrDefault(name, 1);
      }
      for (var topic : deletion.topics()) {
        Object named = topic.name() == null ? topic.topicId() : topic.name();
        count += partitions.getOrDefault(named, 1);
      }
    } else if (request instanceof CreatePartitionsRequestData addition
        && !addition.validateOnly()) {
      for (var topic : addition.topics()) {
        count += Math.max(1, topic.count() - partitions.getOrDefault(topic.name(), 0));
      }
    }
    return count;
  }

  /** An answer with this error on every topic. */
  static ApiMessage refused(ApiMessage request, Errors error, int throttleMs) {
    if (request instanceof CreateTopicsRequestData creation) {
      var response = new CreateTopicsResponseData().setThrottleTimeMs(throttleMs);
      for (var topic : creation.topics()) {
        response
            .topics()
            .add(
                new CreatableTopicResult()
                    .setName(topic.name())
                    .setErrorCode(error.code())
                    .setErrorMessage(error.message()));
      }
      return response;
    }
    if (request instanceof DeleteTopicsRequestData deletion) {
      var response = new DeleteTopicsResponseData().setThrottleTimeMs(throttleMs);
      for (String name : deletion.topicNames()) {
        response.responses().add(deleted(name, Uuid.ZERO_UUID, error));
      }
      for (var topic : deletion.topics()) {
        response.responses().add(deleted(topic.name(), topic.topicId(), error));
      }
      return response;
    }
    List<CreatePartitionsTopicResult> results = new ArrayList<>();
    for (var topic : ((CreatePartitionsRequestData) request).topics()) {
      results.add(
          new CreatePartitionsTopicResult()
              .setName(topic.name())
              .setErrorCode(error.code())
              .setErrorMessage(error.message()));
    }
    return new CreatePartitionsResponseData().setThrottleTimeMs(throttleMs).setResults(results);
  }

  private static DeletableTopicResult deleted(String name, Uuid id, Errors error) {
    return new DeletableTopicResult()
        .setName(name)
        .setTopicId(id)
        .setErrorCode(error.code())
        .setErrorMessage(error.message());
  }
}
