"""The release of this source tree."""

__version__ = "0.1.0"
