"""Prints a completion as it arrives, from the gateway at BATON_TARGET, else at port 7000 of this machine."""

from baton import Client

with Client() as client:
    for event in client.generate("Return the", {"max_tokens": 40}):
        print(event.text, end="", flush=True)
