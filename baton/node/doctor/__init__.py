"""`baton doctor` checks whether this machine, or this pod, has what a node needs.

It prints one verdict per line, with a cure for each bad one. It starts no node and changes nothing.
"""
