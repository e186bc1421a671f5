"""Spark jobs over the decision log: audits that prove the limits held, and backfills of a lost store."""
