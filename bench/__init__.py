"""Benchmarks: what Baton's parts reach, each beside a rival measured in the same run. Knows nothing of tests."""
