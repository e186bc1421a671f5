"""Leases: a part of a quota that a caller spends by itself, and settles."""
