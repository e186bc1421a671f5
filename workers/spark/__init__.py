"""The driver of jobs for Spark: for decision logs of more than one machine."""
