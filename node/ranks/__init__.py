"""A node of several ranks: processes that compute one model together, each with its share of weights and KV.

Rank 0 is the node's own process and speaks for all; the others do as it says.
"""
