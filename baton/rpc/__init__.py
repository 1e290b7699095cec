"""gRPC code that the processes and the client share: servers, channels, statuses, conversions."""
