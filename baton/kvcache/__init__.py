"""The paged KV cache: its layouts, reading and writing it, and the way to wire order and back.

Importing `layout` and `spec` needs no torch.
"""
