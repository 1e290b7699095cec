"""Loads UCX's libraries when it is imported: where a processor does not tell its frequency, each process that loads
them counts clock ticks for 0.3 s of CPU.

For the fork server of `tests.warm`. UCX is not started there, because it does not survive a fork.
"""

from kvtransfer.transports.ucx_trial import load_ucx

load_ucx()
