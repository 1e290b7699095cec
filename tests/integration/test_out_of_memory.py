"""A node for which there is not enough memory ends with one line and exit code 1, whichever rank lacks it."""

import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from baton.config import child_environment
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, arguments, machines

MODEL: Flags = {"model": LLAMA, "device": "cpu", "log_level": "error"}
# More than any address space holds: no machine begins to give it out.
TOO_MANY_BLOCKS = 1 << 34
CACHE_MIB = 1024
MIB = 1 << 20


@contextmanager
def node(flags: Flags, errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A decode node whose words on stderr go to a file."""
    with errors.open("wb") as stderr:
        command = [sys.executable, "-m", "decode_node", *arguments({**MODEL, **flags})]
        popen = subprocess.Popen(command, stderr=stderr, env=child_environment(OMP_NUM_THREADS="1"))
    try:
        yield popen
    finally:
        popen.kill()
        popen.wait()


def worker_of(pid: int) -> psutil.Process:
    """The node's rank 1, as soon as there is one."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for child in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess):  # other programs that a node asks end at once
                if "node.ranks.worker" in child.cmdline():
                    return child
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cache_that_does_not_fit_is_one_line_however_many_ranks_lack_memory(ranks: int, tmp_path: Path) -> None:
    errors = tmp_path / "stderr"
    with node({"num_blocks": TOO_MANY_BLOCKS, "tensor_parallel_size": ranks}, errors) as popen:
        assert popen.wait(DEADLINE_S) == 1
    (line,) = errors.read_text().splitlines()
    assert "decode_node ERROR no memory is left for the KV cache, " in line
    assert re.search(r": \d+\.\d GiB were asked for, \d+\.\d GiB are free; ", line)
    assert "--num-blocks" in line


def test_a_rank_that_alone_lacks_memory_says_so_and_its_node_ends(tmp_path: Path) -> None:
    """Its address space is held to what such a rank needs with a small cache."""
    flags = {**MODEL, "tensor_parallel_size": 2}
    with machines() as start:
        (fits,) = start.nodes(("decode", flags))
        needed_bytes = worker_of(fits.pid).memory_info().vms
    errors = tmp_path / "stderr"
    with node({**flags, "kv_cache_mib": CACHE_MIB}, errors) as popen:
        limit = needed_bytes + CACHE_MIB * MIB // 2
        worker_of(popen.pid).rlimit(resource.RLIMIT_AS, (limit, limit))
        assert popen.wait(DEADLINE_S) == 1
    why, end = errors.read_text().splitlines()
    assert "decode_node rank 1 ERROR no memory is left for the KV cache, " in why
    assert f": {CACHE_MIB / 1024:.1f} GiB were asked for, " in why
    assert re.search(r"decode_node ERROR rank 1 \(pid \d+\) ended with exit code 1: this node ends", end)
