"""Messages between processes of one cluster, which may change in every release."""
