"""Requests, blocks, scheduler, sampler, runner and loop: what both node roles share.

Knows neither transfers nor grpc. `request`, `events`, `batch`, `state`, `block_manager` and `scheduler` are pure: no
tensors, no clock, no thread.
"""
