"""A node for which there is not enough memory ends with one line and exit code 1, whichever rank lacks it."""

import re
import resource
from functools import partial
from pathlib import Path

import psutil
import pytest

from baton.engine import runner_plan
from baton.node.ranks.group import RankGroup
from baton.node.ranks.worker_handle import Worker
from baton.settings.node_config import NodeSettings
from tests.integration.cluster import LLAMA, Flags, Machines, arguments
from tests.warm import run_warm
from tests.warm_children import keep_children_warm, ranks_of

MODEL: Flags = {"model": LLAMA, "device": "cpu", "log_level": "error"}
# More than any address space holds, so the allocation fails at once.
TOO_MANY_BLOCKS = (1 << 31) - 1
CACHE_MIB = 1024
MIB = 1 << 20


def try_any_size() -> None:
    """Sizes that could fit are not refused before the weights are loaded. The test's counts as such."""
    runner_plan.check_fits = lambda *_, **__: None  # type: ignore[attr-defined]


def limit_workers(limit_bytes: int) -> None:
    """Holds the address space of rank 1 to a limit from its start."""
    keep_children_warm(1)  # as the rank is whose size the limit is
    start = RankGroup._start

    def start_limited(self: RankGroup, rank: int, settings: NodeSettings) -> Worker:
        worker = start(self, rank, settings)
        assert worker.popen is not None
        resource.prlimit(worker.popen.pid, resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        return worker

    RankGroup._start = start_limited  # type: ignore[method-assign]


def test_a_cache_that_does_not_fit_is_one_line() -> None:
    flags = {**MODEL, "num_blocks": TOO_MANY_BLOCKS}
    ended = run_warm("decode_node", *arguments(flags), prepare=try_any_size)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "decode_node ERROR no memory is left for the KV cache, " in line
    assert re.search(r": \d+\.\d GiB were asked for, \d+\.\d GiB are free; ", line)
    assert "--kv-cache-mib" in line


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cache_that_never_fits_is_refused_before_the_weights_are_loaded(tmp_path: Path, ranks: int) -> None:
    """However many ranks lack the memory, it is one line."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((LLAMA / name).read_text())
    (tmp_path / "model.safetensors").touch()  # nobody reads it
    flags = {**MODEL, "model": tmp_path, "num_blocks": TOO_MANY_BLOCKS, "tensor_parallel_size": ranks}
    ended = run_warm("decode_node", *arguments(flags))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert re.search(r"decode_node: BATON_KV_CACHE_MIB \(--kv-cache-mib\) is \d+, a KV cache of ", line)
    assert "lower --kv-cache-mib" in line


@pytest.mark.slow
def test_a_rank_that_alone_lacks_memory_reports_it_and_its_node_ends(start: Machines) -> None:
    """Its address space is limited to what such a rank needs with a small cache."""
    flags = {**MODEL, "tensor_parallel_size": 2}
    (fits,) = start.nodes(("decode", flags))
    (worker,) = ranks_of(fits.pid)
    limit_bytes = psutil.Process(worker).memory_info().vms + CACHE_MIB * MIB // 2
    ended = run_warm(
        "decode_node", *arguments({**flags, "kv_cache_mib": CACHE_MIB}), prepare=partial(limit_workers, limit_bytes)
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert re.search(r"decode_node ERROR rank 1 \(pid \d+\): no memory is left for the KV cache, ", line)
    assert f": {CACHE_MIB / 1024:.1f} GiB were asked for, " in line
