"""Constraints on outputs: compiled from `baton.core.types.Grammar`, followed token by token, turned into masks of token
ids.

Gateways compile them to refuse what cannot work, engines to draw tokens by them. Needs no torch and no gRPC.
"""
