"""Layers that keep a state of fixed size instead of KV: their operations over the states of a step's requests.

`rows.py` says which states a step reads and writes. Every operation has a twin in plain torch.
"""
