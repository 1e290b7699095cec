"""Goodput of prefill and decode nodes against as many colocated ones, with default settings and real processes."""
