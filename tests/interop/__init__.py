"""Two versions of Baton in one cluster."""
