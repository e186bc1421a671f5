"""Counts decisions and events, and renders them for Prometheus."""
