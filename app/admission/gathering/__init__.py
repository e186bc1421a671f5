"""Gathers asks into few calls to the store: one call in flight, fair turns, patience, circuit breaker."""
