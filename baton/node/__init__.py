"""What the two node processes share: assembling engine and transfer, describing the node, serving, draining.

The only package that imports both `engine` and `kvtransfer`.
"""
