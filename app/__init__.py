"""Quotagate: cluster-wide quota decisions over HTTP."""

__version__ = "0.1.0"
