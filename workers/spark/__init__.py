"""Spark jobs over the decision log: audits that prove the limits held, and what rebuilds a lost store."""
