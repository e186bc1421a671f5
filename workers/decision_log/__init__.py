"""The decision log at rest: batches from the store become Parquet, compacted and kept for a while."""
