"""Asks over a cluster of stores: a gatherer for each primary, and asks whose buckets are in several slots."""
