"""Prints a completion as it arrives. The gateway is at BATON_TARGET, by default at port 7000 of this machine."""

from baton import Client

with Client() as client:
    for event in client.generate("Return the", {"max_tokens": 40}):
        print(event.text, end="", flush=True)
