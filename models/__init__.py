"""Model families, their configurations, and loading.

Knows attention and baton only: no requests, no blocks, no transfers. Importing this package imports no torch, nor do
its modules `config`, `config_file`, `rope_config`, `checkpoint` and `identity`; the others do.
"""
