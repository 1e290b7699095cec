"""Conversations: a request's messages to prompt tokens, and the model's text back to answer, reasoning and tool calls.

Pure: no I/O but the reading of the checkpoint's files at start, no clock, no task. All doors use it.
"""
