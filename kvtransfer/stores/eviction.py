"""Chooses which entry leaves a full store: the one that is cheapest to compute again, for each byte. Pure.

Implements GreedyDual (Young 1994; Cao and Irani 1997 for sizes): an entry's value is its cost plus the value of the
last entry that was evicted, so that old entries lose against new ones at last. An entry leaves only after all entries
that follow it in its sequences, because those are useless without it.
"""
