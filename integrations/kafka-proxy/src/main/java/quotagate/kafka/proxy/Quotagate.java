// The filter's type, which Kroxylicious finds under the name `Quotagate`.
package quotagate.kafka.proxy;

import io.kroxylicious.proxy.filter.Filter;
import io.kroxylicious.proxy.filter.FilterFactory;
import io.kroxylicious.proxy.filter.FilterFactoryContext;
import io.kroxylicious.proxy.plugin.Plugin;
import io.kroxylicious.proxy.plugin.PluginConfigurationException;
import io.kroxylicious.proxy.plugin.Plugins;

/** Makes one filter for each connection; all of them ask over the same few HTTP connections. */
@Plugin(configType = Settings.class)
public final class Quotagate implements FilterFactory<Settings, Askers> {
  @Override
  public Askers initialize(FilterFactoryContext context, Settings settings)
      throws PluginConfigurationException {
    return Askers.of(Plugins.requireConfig(this, settings));
  }

  @Override
  public Filter createFilter(FilterFactoryContext context, Askers askers) {
    return new QuotaFilter(askers, context.filterDispatchExecutor());
  }

  @Override
  public void close(Askers askers) {
    askers.close();
  }
}
