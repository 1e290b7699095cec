"""The prefill node: computes prompts chunk by chunk, sends their KV, samples the first token. `python -m prefill_node`.

Start reading in `handover.py`, which is one request's life on this side, from top to bottom.
"""
