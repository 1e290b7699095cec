"""The layers from which families are built."""
