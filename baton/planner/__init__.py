"""Plans clusters: a simulation of gateways and nodes in virtual time, and the search for the cluster that is needed."""
