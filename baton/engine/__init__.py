"""Requests, blocks, scheduler, sampler, runner and loop, which both node roles share.

`request`, `events`, `batch`, `sampling.row` and all of `scheduling` are pure: no tensors, no clock, no thread.
"""
