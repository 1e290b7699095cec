"""The Triton kernels: pure functions of tensors, one file per idea. Tests compare each with a plain-torch twin.

A kernel takes strides, so that one kernel serves every cache layout. Of a kernel for Hopper, `hopper.py` has the launch
and the division of work among warps; its loading warp and its multiplying warps may have files of their own next to it,
such as `hopper_load.py` and `hopper_attend.py`.
"""
