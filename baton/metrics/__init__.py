"""What a process counts, and how Prometheus reads it. Start with `declared.py`, the table of all metrics."""
