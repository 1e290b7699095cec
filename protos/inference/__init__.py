"""The wire of the Open Inference Protocol, version 2."""
