"""What the gateway records of requests: metrics, latencies, timelines, traces."""
