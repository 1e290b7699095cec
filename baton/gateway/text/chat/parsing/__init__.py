"""Splits the model's text, as it comes, into reasoning, answer and tool calls.

The reader of each format is a generator over a `Cursor`, which yields where it needs more text. Its decisions depend on
the text only, never on how the text was cut.
"""
