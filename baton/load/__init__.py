"""Loads a server: plans requests, sends them from client processes, and evaluates the answers."""
