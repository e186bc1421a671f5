"""The basics of every Quotagate process: settings, logs, the home directory and child processes."""
