"""The prefill node: computes prompts chunk by chunk, sends their KV, samples the first token. `python -m prefill_node`.

Start reading in `prefill_task.py`, which has the states of one call from its ticket to its end.
"""
