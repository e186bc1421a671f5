"""The stored quotas: their tables and SQL, and the snapshot in memory that follows them."""
