"""What every other package may use: errors, configuration, plain types, the client and the command line."""

__version__ = "0.1.0"
