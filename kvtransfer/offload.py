"""The entries of one rank's cache: copies them to host memory and back, checked. Used by the transfer thread only.

save:  cache ──gather, digest──► slot ──► host memory ··► stores below, written behind
load:  stores below ··► host memory ──► slot ──check digest──► scatter ──► cache
"""
