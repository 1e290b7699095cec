"""Observability of requests: metrics, latencies, timelines, traces."""
