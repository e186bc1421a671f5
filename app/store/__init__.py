"""Counters in motion: the port, and the Redis store whose one script decides."""
