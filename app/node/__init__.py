"""What every Quotagate process starts with: settings, logs, the home directory and child processes."""
