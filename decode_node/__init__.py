"""The decode node: reserves blocks, receives KV, decodes. `python -m decode_node`.

Start reading in `handover.py`, which is one request's life on this side, from top to bottom.
"""
