"""The counters: the port to a store, and the Redis store, in which one script decides."""
