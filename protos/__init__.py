"""The wire of Baton: the `.proto` files, and the code that `python protos/generate.py` builds beside them.

Knows nothing of the rest of the repository.
"""
