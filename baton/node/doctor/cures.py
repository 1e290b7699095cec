"""Cures for a slow link, by the carrier of its bytes."""

THROUGH_HOST = " through host memory"

_SHARE = (
    "where both are on one machine, let them share memory: the same PID and IPC namespaces (hostPID and hostIPC, or "
    "one pod with shareProcessNamespace), one /dev/shm that is large enough, and no UCX_TLS that leaves shared memory "
    "out; between machines give both an RDMA device (UCX_NET_DEVICES lists those in use) and an unlimited memlock. "
    "`baton doctor` on both says which of these is missing"
)
_REACH_GPUS = "the GPUs do not reach each other directly: show both to both processes, and share the host's IPC"
_OTHER = "look for what else uses this machine, or lower the floor"


def cure_for(carrier: str) -> str:
    """What makes a link over this carrier faster.

    Args:
        carrier: such as "tcp" or "sysv"; with THROUGH_HOST if it does not reach GPU memory.
    """
    if carrier.endswith(THROUGH_HOST):
        return _REACH_GPUS
    return _SHARE if carrier.startswith("tcp") else _OTHER
