"""Converts a conversation's messages to a prompt, and the model's text to answer, reasoning and tool calls.

All APIs use it. It does no I/O, except that it reads the checkpoint's files at start and renders in another process.
Only templates see the date.
"""
