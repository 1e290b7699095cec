"""Cures for a slow link, by the carrier of its bytes."""

THROUGH_HOST = " through host memory"

_SHARE = (
    "on one machine, let both processes share memory: the same PID and IPC namespaces (hostPID and hostIPC, or one pod "
    "with shareProcessNamespace), one large enough /dev/shm, and no UCX_TLS that leaves out shared memory; between "
    "machines, give both an RDMA device (UCX_NET_DEVICES lists those in use) and an unlimited memlock. "
    "`baton doctor` on both shows what is missing"
)
_REACH_GPUS = "the GPUs do not reach each other directly: make both visible to both processes, and share the host's IPC"
_OTHER = "look for other load on this machine, or lower the floor"


def cure_for(carrier: str) -> str:
    """The advice that makes a link over this carrier faster.

    Args:
        carrier: such as "tcp" or "sysv"; with THROUGH_HOST if it does not reach GPU memory.
    """
    if carrier.endswith(THROUGH_HOST):
        return _REACH_GPUS
    return _SHARE if carrier.startswith("tcp") else _OTHER
