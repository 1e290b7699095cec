"""Benchmarks of structured output."""
