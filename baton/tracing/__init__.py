"""What one request's trace consists of, for OpenTelemetry. Start with `declared.py`, the table of all spans."""
