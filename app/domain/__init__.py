"""What Quotagate means: pure rules, no clock, no I/O; the standard library and mmh3 only."""
