"""The Python client: typed requests, events and errors over gRPC, and resumption at another gateway."""
