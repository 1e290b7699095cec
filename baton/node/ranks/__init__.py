"""A node of several ranks: processes that compute one model together, each with its share of weights and KV.

Rank 0 is the node's own process and leads; the others follow its steps and calls.
"""
