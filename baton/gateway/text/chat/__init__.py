"""Conversations: a request's messages to prompt tokens, and the model's text back to answer, reasoning and tool calls.

Pure: no I/O but the reading of the checkpoint's files at start, no task. Only templates see the date. All doors use it.
"""
