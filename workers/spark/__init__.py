"""The driver of jobs for Spark: for decision logs that are too large for one machine."""
