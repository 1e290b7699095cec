"""The decode node: reserves blocks, receives KV, decodes. `python -m decode_node`.

Start with `decode_task.py`, one request's life on this node; `machine.py` holds all requests, `driver.py` runs it.
"""
