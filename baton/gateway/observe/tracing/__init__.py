"""One trace per request, made at its end from the times of its events. Start with `tracer.py`."""
