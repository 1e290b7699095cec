"""Traces of requests, built at a request's end from the times of its events. Start with `tracer.py`."""
