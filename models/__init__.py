"""Model families, their configurations, and loading.

Knows attention and baton only: no requests, no blocks, no transfers. Importing this package imports no torch, nor do
its modules `checkpoint`, `identity` and those with `config` in their name; the others do.
"""
