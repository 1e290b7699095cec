"""The Triton kernels: pure functions of tensors, one file per idea. Tests compare each with a plain-torch twin.

A kernel takes strides, so that one kernel serves every cache layout. For a Hopper kernel, `hopper.py` has the launch
and the division of work among warps. Its loading and multiplying warps may have their own files next to it, such as
`hopper_load.py` and `hopper_attend.py`.
"""
