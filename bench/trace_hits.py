"""The most prefix hits that any routing can reach on a trace: one cache for all nodes, which keeps what was used last.

`python -m bench.trace_hits TRACE` prints the share of the prompts' blocks that the cache has, for several sizes of the
cache and beginnings of the trace. Each turn finds its KV wherever it was computed, copies take no time and nothing is
kept twice, so nodes that keep what was used last stay below these numbers. A second table has one node's hits with host
memory that is a number of times its cache.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from baton.load.traces import MOONCAKE_PREFIX_TOKENS, TraceRequest, read_trace

MILLION_TOKENS = (6.6, 13.0, 20.0, 32.0, None)
SECONDS = (500.0, 1800.0, None)
# One node's cache on its GPU, and how many times as much it keeps in host memory.
CACHE_GIB = (30, 50, 110)
TIMES = (1.0, 1.5, 2.0, 4.0, 8.0)
_BYTES_PER_TOKEN = 131072  # of Llama-3.1-8B's KV in bf16


def hit_share(requests: Iterable[TraceRequest], blocks: int | None) -> float:
    """The share of all blocks that the cache has when their prompt arrives, together with all blocks before them.

    Args:
        blocks: size of the cache; None: it keeps everything.
    """
    kept = OrderedDict[int, None]()
    found = total = 0
    for request in requests:
        ids = request.prefix_ids
        total += len(ids)
        found += next((number for number, block in enumerate(ids) if block not in kept), len(ids))
        for block in reversed(ids):  # so that the end of a prompt leaves before its beginning
            kept[block] = None
            kept.move_to_end(block)
        while blocks is not None and len(kept) > blocks:
            kept.popitem(last=False)
    return found / total if total else 0.0


def table(requests: Sequence[TraceRequest]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    sizes = ("no bound" if size is None else f"{size:g}M tokens" for size in MILLION_TOKENS)
    yield f"| requests | {' | '.join(sizes)} |"
    yield "|---" * (1 + len(MILLION_TOKENS)) + "|"
    for seconds in SECONDS:
        part = [request for request in requests if seconds is None or request.at_s < seconds]
        name = "all" if seconds is None else f"the first {seconds:,.0f} s"
        shares = (f"{100 * hit_share(part, _blocks(size)):.1f} %" for size in MILLION_TOKENS)
        yield f"| {name}: {len(part):,} | {' | '.join(shares)} |"


def host_table(requests: Sequence[TraceRequest]) -> Iterator[str]:
    """The lines of a table for one node that also keeps everything in host memory. So the larger of the two decides."""
    yield f"| cache | {' | '.join(f'{times:g} times' for times in TIMES)} |"
    yield "|---" * (1 + len(TIMES)) + "|"
    for gib in CACHE_GIB:
        sizes = (_blocks(gib * times * 2**30 / _BYTES_PER_TOKEN / 1e6) for times in TIMES)
        yield f"| {gib} GiB | {' | '.join(f'{100 * hit_share(requests, size):.1f} %' for size in sizes)} |"


def _blocks(million_tokens: float | None) -> int | None:
    return None if million_tokens is None else int(million_tokens * 1e6) // MOONCAKE_PREFIX_TOKENS


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("bench: name the trace's file, such as mooncake_conversation.jsonl.xz")
    trace = read_trace(Path(sys.argv[1]))
    print("\n".join((*table(trace), "", *host_table(trace))))
