"""Quota definitions at rest: tables, all SQL, and the snapshot in memory that follows them."""
