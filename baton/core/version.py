"""The release of this source tree."""

__version__ = "0.2.0"
