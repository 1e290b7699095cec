"""Settings of all processes, and the only readers of the environment."""
