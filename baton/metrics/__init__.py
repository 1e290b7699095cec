"""Counts what a process does, and serves the metrics to Prometheus. Start with `declared.py`, the table of all
metrics."""
