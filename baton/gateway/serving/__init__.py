"""Serves requests, from a client's message to the finished answer: validation, admission, fan-out."""
