"""The gateway's knowledge of its nodes: discovery, load, prefix caches, and the choice among them."""
