// Looks for changes in Quotagate, on a thread of its own.
package quotagate.kafka.plugin;

import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import java.util.function.DoubleConsumer;
import org.jspecify.annotations.Nullable;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The polls of one plugin. Each poll asks for quotas by ETag, and for the throttle factor; a value
 * that it cannot read stays in force.
 */
final class Poller implements AutoCloseable {
  private static final Logger LOGGER = LoggerFactory.getLogger(Poller.class);

  /** The longest time between polls while they fail, if the usual time is not longer. */
  static final long MAX_BACK_OFF_MS = 5_000;

  private static final long LOG_EVERY_NANOS = TimeUnit.SECONDS.toNanos(60);
  private static final int MAX_DOUBLINGS = 16;

  /** How the polls went; replaced as a whole. */
  record Outcome(
      long polls,
      long failed,
      long failedInARow,
      String lastFailure,
      long answeredNanos,
      boolean answered,
      @Nullable String version) {}

  private final Settings settings;
  private final Reader reader;
  private final Consumer<Quotas> onQuotas;
  private final DoubleConsumer onFactor;
  private final Thread thread;
  private boolean haveQuotas;
  private long saidNanos;
  private volatile boolean closed;
  private volatile Outcome outcome = new Outcome(0, 0, 0, "", 0, false, null);

  Poller(Settings settings, Consumer<Quotas> onQuotas, DoubleConsumer onFactor) {
    this.settings = settings;
    this.reader = new Reader(settings);
    this.onQuotas = onQuotas;
    this.onFactor = onFactor;
    this.thread = new Thread(this::run, "quotagate-poller");
    thread.setDaemon(true);
  }

  void start() {
    thread.start();
  }

  Outcome outcome() {
    return outcome;
  }

  private void run() {
    try {
      while (!closed) {
        List<Exception> failures = poll();
        if (closed) {
          return; // close() interrupted the poll, which is no failure
        }
        note(failures);
        double spread = ThreadLocalRandom.current().nextDouble();
        Thread.sleep(waitMs(settings.pollMs(), outcome.failedInARow(), spread));
      }
    } catch (InterruptedException e) {
      // closed
    }
  }

  /** Poll the quotas and the factor; each is taken even if the other fails. */
  private List<Exception> poll() throws InterruptedException {
    List<Exception> failures = new ArrayList<>(2);
    try {
      Quotas changed = reader.quotas();
      if (changed != null) {
        onQuotas.accept(changed);
        haveQuotas = true;
      }
    } catch (IOException | RuntimeException e) {
      failures.add(e);
    }
    try {
      onFactor.accept(reader.factor());
    } catch (IOException | RuntimeException e) {
      failures.add(e);
    }
    return failures;
  }

  private void note(List<Exception> failures) {
    Outcome before = outcome;
    boolean failed = !failures.isEmpty();
    long now = System.nanoTime();
    outcome =
        new Outcome(
            before.polls + 1,
            before.failed + (failed ? 1 : 0),
            failed ? before.failedInARow + 1 : 0,
            failed ? said(failures.get(0)) : before.lastFailure,
            failed ? before.answeredNanos : now,
            before.answered || !failed,
            reader.etag());
    if (failed && (before.failedInARow == 0 || now - saidNanos >= LOG_EVERY_NANOS)) {
      saidNanos = now;
      LOGGER.warn(
          "Quotagate at {} gives no limits ({}): {}",
          settings.url(),
          outcome.lastFailure,
          haveQuotas
              ? "the last ones stay in force"
              : "none have been read yet, so nothing is limited");
    } else if (!failed && before.failedInARow > 0) {
      LOGGER.info("Quotagate at {} answers again", settings.url());
    }
  }

  private static String said(Exception failure) {
    Throwable cause = failure.getCause() == null ? failure : failure.getCause();
    return cause.getMessage() == null ? cause.toString() : cause.getMessage();
  }

  /**
   * The time until the next poll. It doubles with each failure, and is then spread at random, so
   * that brokers do not poll all at once.
   *
   * @param spread from 0, the least, to 1
   */
  static long waitMs(int pollMs, long failedInARow, double spread) {
    if (failedInARow == 0) {
      return pollMs;
    }
    long doubled = (long) pollMs << Math.min(failedInARow, MAX_DOUBLINGS);
    long most = Math.min(doubled, Math.max(pollMs, MAX_BACK_OFF_MS));
    return most / 2 + (long) (spread * (most - most / 2));
  }

  @Override
  public void close() {
    closed = true;
    thread.interrupt();
    reader.close();
  }
}
