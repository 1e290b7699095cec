"""The model's text, as it comes, to reasoning, answer and tool calls.

Each format is a generator over a `Cursor` that yields where it needs more text. What it decides depends on the text
only, never on how the text was cut.
"""
