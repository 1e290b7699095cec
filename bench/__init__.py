"""Benchmarks of Baton's parts, each against a rival measured in the same run."""
