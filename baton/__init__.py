"""Errors, configuration, plain types, the client and the command line: what every other package may use. No torch."""

__version__ = "0.1.0"
