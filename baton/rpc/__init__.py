"""What the three processes share on the side of gRPC: serving, statuses, the Node service. No torch."""
