"""`baton doctor`: does this machine, or this pod, have what a node needs?

One verdict per line, and a cure for each that is bad. Starts no node and changes nothing.
"""
