"""One request's path through the nodes: the pure machine, its driver, and the connections to nodes."""
