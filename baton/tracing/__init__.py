"""Describes the trace of one request, for OpenTelemetry. Start with `declared.py`, the table of all spans."""
