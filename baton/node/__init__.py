"""The parts that both node processes share: assembling engine and transfer, describing the node, serving, draining.

No other package under `baton` imports both `baton.engine` and `kvtransfer`.
"""
