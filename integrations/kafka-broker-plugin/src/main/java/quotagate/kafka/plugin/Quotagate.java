// The plugin's type, which a broker loads by `client.quota.callback.class`.
package quotagate.kafka.plugin;

import java.lang.management.ManagementFactory;
import java.util.EnumMap;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import javax.management.InstanceAlreadyExistsException;
import javax.management.JMException;
import javax.management.ObjectName;
import org.apache.kafka.common.Cluster;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.security.auth.KafkaPrincipal;
import org.apache.kafka.server.quota.ClientQuotaCallback;
import org.apache.kafka.server.quota.ClientQuotaEntity;
import org.apache.kafka.server.quota.ClientQuotaType;
import org.jspecify.annotations.Nullable;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * A broker's client quotas, taken from Quotagate.
 *
 * <p>Calls on the broker's request path are answered from memory. A separate thread polls for
 * changes.
 */
public final class Quotagate implements ClientQuotaCallback {
  private static final Logger LOGGER = LoggerFactory.getLogger(Quotagate.class);

  private static final int SHOWN_ZEROS = 10;

  private final Map<ClientQuotaType, AtomicBoolean> resets = new EnumMap<>(ClientQuotaType.class);
  private final AtomicBoolean saidOwnQuotas = new AtomicBoolean();
  private volatile Limits limits = new Limits(Quotas.NONE, 1, 1, Set.of());
  private boolean counted;
  @Nullable private Poller poller;
  @Nullable private ObjectName name;

  /** Called by the broker. */
  public Quotagate() {
    for (ClientQuotaType type : ClientQuotaType.values()) {
      resets.put(type, new AtomicBoolean());
    }
  }

  @Override
  public void configure(Map<String, ?> configs) {
    Settings settings = Settings.of(configs);
    Integer brokers = settings.brokers();
    counted = brokers == null;
    limits = new Limits(Quotas.NONE, 1, brokers == null ? 1 : brokers, settings.excluded());
    poller = new Poller(settings, this::take, this::take);
    name = registered(new Status());
    poller.start();
    LOGGER.info(
        "Client quotas come from Quotagate at {}, every {} ms; limits are divided by {}",
        settings.url(),
        settings.pollMs(),
        brokers == null ? "the number of brokers" : brokers);
  }

  @Override
  public Map<String, String> quotaMetricTags(
      ClientQuotaType type, KafkaPrincipal principal, @Nullable String clientId) {
    Limits now = limits;
    String user = principal == null || principal.getName().isEmpty() ? null : principal.getName();
    Entity bucket = now.quotas().ladder(type).bucket(user, clientId == null ? "" : clientId);
    return Tags.of(bucket, type == ClientQuotaType.PRODUCE && now.excludes(user));
  }

  @Override
  @Nullable
  public Double quotaLimit(ClientQuotaType type, Map<String, String> metricTags) {
    return limits.limit(type, Tags.bucket(metricTags), Tags.excluded(metricTags));
  }

  @Override
  public boolean quotaResetRequired(ClientQuotaType type) {
    AtomicBoolean reset = Objects.requireNonNull(resets.get(type));
    return reset.get() && reset.getAndSet(false);
  }

  @Override
  public synchronized boolean updateClusterMetadata(Cluster cluster) {
    // The cluster has a broker once for each of its listeners.
    int alive = (int) cluster.nodes().stream().mapToInt(Node::id).distinct().count();
    if (!counted || alive == 0 || alive == limits.brokers()) {
      return false;
    }
    LOGGER.info("{} brokers are alive, so limits are divided by {}", alive, alive);
    limits = limits.among(alive);
    return true;
  }

  private synchronized void take(Quotas read) {
    Limits before = limits;
    limits = before.with(read);
    boolean changed = before.quotas().equals(Quotas.NONE);
    for (ClientQuotaType type : ClientQuotaType.values()) {
      if (!read.ladder(type).rules().equals(before.quotas().ladder(type).rules())) {
        // Only now that the limits are in place: a broker that sees the mark reads them.
        Objects.requireNonNull(resets.get(type)).set(true);
        changed = true;
      }
    }
    if (changed) {
      LOGGER.info("Quotagate has {} quotas for brokers", read.size());
    }
    if (!read.zeros().isEmpty() && !read.zeros().equals(before.quotas().zeros())) {
      LOGGER.warn(
          "A broker cannot enforce a limit of 0, so these are left to the proxy and limit nothing"
              + " here: {}{}",
          read.zeros().subList(0, Math.min(SHOWN_ZEROS, read.zeros().size())),
          read.zeros().size() > SHOWN_ZEROS ? " and others" : "");
    }
  }

  private synchronized void take(double factor) {
    Limits before = limits;
    if (factor == before.factor()) {
      return;
    }
    limits = before.with(factor);
    Objects.requireNonNull(resets.get(ClientQuotaType.PRODUCE)).set(true);
    if (factor == 0) {
      LOGGER.warn(
          "The throttle factor is 0, which a broker cannot enforce: holding producers is left to"
              + " the proxy, and limits here are unscaled");
    } else {
      LOGGER.info("The throttle factor is {}", factor);
    }
  }

  @Override
  public void updateQuota(ClientQuotaType type, ClientQuotaEntity entity, double value) {
    if (saidOwnQuotas.compareAndSet(false, true)) {
      LOGGER.warn(
          "Quotas that are set in Kafka have no effect while they come from Quotagate, such as {}"
              + " of {}",
          type,
          entity);
    }
  }

  @Override
  public void removeQuota(ClientQuotaType type, ClientQuotaEntity entity) {
    // It had no effect.
  }

  @Override
  public void close() {
    if (poller != null) {
      poller.close();
    }
    if (name != null) {
      try {
        ManagementFactory.getPlatformMBeanServer().unregisterMBean(name);
      } catch (JMException e) {
        LOGGER.warn("{} is still shown by JMX", name, e);
      }
    }
  }

  /** Show a status by JMX; a process that is broker and controller has two plugins. */
  @Nullable
  private static ObjectName registered(PluginStatusMXBean status) {
    for (int number = 0; ; number++) {
      try {
        var named = new ObjectName("quotagate:type=KafkaBrokerPlugin,number=" + number);
        ManagementFactory.getPlatformMBeanServer().registerMBean(status, named);
        return named;
      } catch (InstanceAlreadyExistsException e) {
        // the next number
      } catch (JMException e) {
        LOGGER.warn("The plugin is not shown by JMX", e);
        return null;
      }
    }
  }

  private final class Status implements PluginStatusMXBean {
    private Poller.Outcome outcome() {
      return Objects.requireNonNull(poller).outcome();
    }

    @Override
    public long getPolls() {
      return outcome().polls();
    }

    @Override
    public long getFailedPolls() {
      return outcome().failed();
    }

    @Override
    public long getFailedPollsInARow() {
      return outcome().failedInARow();
    }

    @Override
    public String getLastFailure() {
      return outcome().lastFailure();
    }

    @Override
    public long getLastAnswerAgeMs() {
      Poller.Outcome now = outcome();
      return now.answered()
          ? TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - now.answeredNanos())
          : -1;
    }

    @Override
    @Nullable
    public String getVersion() {
      return outcome().version();
    }

    @Override
    public int getQuotas() {
      return limits.quotas().size();
    }

    @Override
    public int getQuotasLeftToProxy() {
      return limits.quotas().zeros().size();
    }

    @Override
    public double getThrottleFactor() {
      return limits.factor();
    }

    @Override
    public int getBrokers() {
      return limits.brokers();
    }
  }
}
