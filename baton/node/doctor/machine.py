"""Checks what the operating system and the container allow: shared and locked memory, files, processes, devices.

Checks take a `Host` and the files under a root, so that tests can describe other machines.
"""

import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.node.doctor.verdict import Verdict, fail, ok, warn

MIB = 1 << 20
# A UCX worker's queues take about 6 MiB of shared memory, and every pair has a worker on both ends.
_SHM_PER_PAIR_BYTES = 8 * MIB
_FILES_PER_PAIR = 16
_FILES_BASE = 256
_UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Host:
    """Facts that the operating system reports about this machine and this process.

    Attributes:
        available_bytes: of main memory.
        first_process: name of process 1; empty if it is hidden.
        locked_bytes, open_files: this process's limits.
    """

    available_bytes: int
    first_process: str
    locked_bytes: int
    open_files: int


def read_host() -> Host:
    try:
        first = psutil.Process(1).name()
    except psutil.Error:
        first = ""
    return Host(
        available_bytes=psutil.virtual_memory().available,
        first_process=first,
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


@dataclass(frozen=True)
class Wanted:
    """Requirements of the node that will run here.

    Attributes:
        pairs: number of peers.
        cache_bytes: size of a cache in main memory; 0 for a cache on a GPU.
        staging_bytes: size of both directions together.
    """

    pairs: int = 8
    cache_bytes: int = 128 * MIB
    staging_bytes: int = 32 * MIB


def check_machine(wanted: Wanted, host: Host, root: Path = Path("/")) -> Iterator[Verdict]:
    yield _shared_memory(wanted, root / "dev/shm")
    yield _memory(wanted, host.available_bytes, _cgroup_limit(root))
    yield _locked_memory(wanted, host.locked_bytes, rdma=_has_rdma(root))
    yield _open_files(wanted, host.open_files)
    yield _process_namespace(host.first_process)
    yield _rdma_devices(root)


def _shared_memory(wanted: Wanted, mount: Path) -> Verdict:
    check = "/dev/shm"
    if not mount.is_dir():
        return fail(check, "missing", "mount a tmpfs there; in a pod, an emptyDir with medium: Memory")
    free, needed = shutil.disk_usage(mount).free, wanted.pairs * _SHM_PER_PAIR_BYTES
    found = f"{free / MIB:.0f} MiB free, {wanted.pairs} pairs need {needed / MIB:.0f}"
    if free < needed:
        cure = f"in a pod, give the emptyDir at /dev/shm a sizeLimit of {2 * needed // MIB}Mi; in Docker, --shm-size"
        return fail(check, found, cure)
    return ok(check, found)


def _memory(wanted: Wanted, available: int, limit: int | None) -> Verdict:
    needed = wanted.cache_bytes + wanted.staging_bytes
    room = available if limit is None else min(limit, available)
    source = "available" if limit is None or available < limit else "allowed to this container"
    found = f"{room / MIB:.0f} MiB {source}, cache and staging take {needed / MIB:.0f}"
    if room < needed:
        return fail("memory", found, "raise the memory limit, or lower --kv-cache-mib or --segment-mib")
    return ok("memory", found)


def _cgroup_limit(root: Path) -> int | None:
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(root / name)
        if text.isdigit():
            return int(text)
    return None


def _locked_memory(wanted: Wanted, limit: int, *, rdma: bool) -> Verdict:
    check = "locked memory"
    if limit == _UNLIMITED:
        return ok(check, "unlimited")
    found = f"{limit // MIB} MiB"
    if limit >= wanted.staging_bytes:
        return ok(check, f"{found}, staging takes {wanted.staging_bytes // MIB}")
    if not rdma:
        return ok(check, f"{found}; enough, because there is no RDMA device")
    cure = "set the memlock limit to unlimited (ulimit -l, LimitMEMLOCK of the container runtime), or add IPC_LOCK"
    return fail(check, f"{found}, RDMA pins {wanted.staging_bytes // MIB} MiB of staging", cure)


def _open_files(wanted: Wanted, limit: int) -> Verdict:
    needed = _FILES_BASE + wanted.pairs * _FILES_PER_PAIR
    found = f"{limit}, {wanted.pairs} pairs need {needed}"
    if limit != _UNLIMITED and limit < needed:
        return fail("open files", found, f"raise the limit (ulimit -n) to {2 * needed}")
    return ok("open files", "unlimited" if limit == _UNLIMITED else found)


def _process_namespace(first: str) -> Verdict:
    """Nodes of one machine reach each other's shared memory through /proc if they see each other's processes."""
    check = "process namespace"
    if first in ("", "systemd", "init"):
        return ok(check, "the host's" if first else "unknown")
    return warn(
        check,
        f"a container's own (process 1 is {first})",
        "nodes in other pods of this machine are reached over the network; to use shared memory and cuda_ipc between "
        "them, give both hostPID: true, or put them into one pod with shareProcessNamespace: true",
    )


def _has_rdma(root: Path) -> bool:
    return any((root / "sys/class/infiniband").glob("*"))


def _rdma_devices(root: Path) -> Verdict:
    check = "RDMA devices"
    names = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if not names:
        return ok(check, "none: between machines KV goes over tcp")
    if not any((root / "dev/infiniband").glob("uverbs*")):
        cure = "in a pod, request the device plugin's resource (such as rdma/hca); in Docker, --device=/dev/infiniband"
        return fail(check, f"{', '.join(names)}, and none can be opened here", cure)
    active = [name for name in names if any("ACTIVE" in _read(path) for path in _port_states(root, name))]
    if not active:
        return fail(check, f"{', '.join(names)}, no port is active", "connect a cable, or start the subnet manager")
    return ok(check, ", ".join(active))


def _port_states(root: Path, device: str) -> Iterator[Path]:
    yield from (root / "sys/class/infiniband" / device / "ports").glob("*/state")


def _read(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
