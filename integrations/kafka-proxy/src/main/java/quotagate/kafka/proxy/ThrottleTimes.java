// Writes a throttle time into a response of any kind that has one.
package quotagate.kafka.proxy;

import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.MethodType;
import org.apache.kafka.common.protocol.ApiMessage;
import org.jspecify.annotations.Nullable;

/** Kafka's response classes have nothing in common but the names of their methods. */
final class ThrottleTimes {
  private record Access(MethodHandle get, MethodHandle set) {}

  private static final ClassValue<Access[]> ACCESS =
      new ClassValue<>() {
        @Override
        protected Access[] computeValue(Class<?> type) {
          MethodHandles.Lookup lookup = MethodHandles.publicLookup();
          try {
            return new Access[] {
              new Access(
                  lookup.findVirtual(type, "throttleTimeMs", MethodType.methodType(int.class)),
                  lookup.findVirtual(
                      type, "setThrottleTimeMs", MethodType.methodType(type, int.class)))
            };
          } catch (NoSuchMethodException | IllegalAccessException e) {
            return new Access[0];
          }
        }
      };

  private ThrottleTimes() {}

  /**
   * Raise a response's throttle time to at least this many milliseconds; a longer time of the
   * broker remains.
   */
  static void raise(ApiMessage response, long throttleMs) {
    Access access = of(response);
    if (access == null || throttleMs <= 0) {
      return;
    }
    int wanted = (int) Math.min(throttleMs, Integer.MAX_VALUE);
    try {
      if ((int) access.get().invoke(response) < wanted) {
        access.set().invoke(response, wanted);
      }
    } catch (Throwable e) {
      throw new IllegalStateException(e);
    }
  }

  @Nullable
  private static Access of(ApiMessage response) {
    Access[] found = ACCESS.get(response.getClass());
    return found.length == 0 ? null : found[0];
  }
}
