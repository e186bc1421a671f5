"""The audit: what should have been decided, recomputed from the raw asks, and compared with what was."""
