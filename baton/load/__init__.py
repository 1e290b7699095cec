"""Load on a server: what is asked when, the clients that ask it, and what is made of their answers."""
