"""The writer of the decision log: writes batches to Parquet, merges the files, and removes old ones."""
