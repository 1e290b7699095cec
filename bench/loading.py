"""Loading a model from disk against plain reads of the same files: cold, and from the page cache.

A checkpoint in several files is written to a temporary directory, and evicted from the page cache before every cold
read. Plain reads with the fastest number of threads take turns with loads. `python -m bench.loading 16 /data` prints
the table for 16 GiB on the disk of that directory.
"""

import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from baton.engine.build import build_runner
from baton.settings.node_config import NodeSettings
from bench.llama_checkpoint import Written, llama_of, write_llama
from bench.plain_reads import Plain, drop
from bench.table import Row, print_rows
from bench.transport import memcpy_gigabytes_per_s

GIB, GIB_ON_GPU = 2.3, 15.0
FILES = 8
GOAL = 0.9
ROUNDS = 5
# Time for finding the fastest plain read, and for the rounds; each way gets at least one round.
SCOUT_S, TURNS_S = 25.0, 60.0
# The fastest on most disks first.
PLAIN = (
    Plain(8),
    Plain(8, direct=True),
    Plain(1),
    Plain(16, direct=True),
    Plain(4),
    Plain(4, direct=True),
    Plain(16),
    Plain(1, direct=True),
)
PLAIN_WARM = tuple(Plain(threads) for threads in (1, 2, 4, 8))
# Share of cold files that may remain in the page cache.
CACHED_MAX = 0.01

Way = Callable[[], float]


def run(progress: Callable[[str], None], gib: float | None = None, directory: Path | None = None) -> Iterator[Row]:
    """The rows of this benchmark; takes one to two minutes.

    Args:
        gib: size of the checkpoint; None: 15 GiB if there is a GPU and the disk has room, else 2.3.
        directory: on the disk to measure; None: the directory for temporary files.

    Raises:
        RuntimeError: the files stay in the page cache, so the disk cannot be measured.
    """
    with tempfile.TemporaryDirectory(prefix="baton-loading-", dir=directory) as path:
        if gib is None:
            roomy = shutil.disk_usage(path).free > 1.2 * GIB_ON_GPU * (1 << 30)
            gib = GIB_ON_GPU if roomy and torch.cuda.is_available() else GIB
        progress(f"loading: writing {gib:g} GiB to {path}")
        written = write_llama(Path(path), *llama_of(round(gib * (1 << 30))), num_files=FILES)
        bench = _Bench(Path(path), written, progress)
        bench.load()  # the first load also does the one-time setup of the process
        yield from bench.warm()
        yield from bench.cold()


@dataclass(frozen=True)
class _Bench:
    """One checkpoint and the ways to read it."""

    directory: Path
    written: Written
    progress: Callable[[str], None]

    def warm(self) -> Iterator[Row]:
        """These rows have no goal: a load writes to new memory, which costs more than the copy."""
        plain = min(min(each.seconds(self.written.files) for _ in range(2)) for each in PLAIN_WARM)
        load = min(self.load() for _ in range(3))
        rivals = (("plain read, warm,", self._rate(plain)), ("memcpy, 1 thread,", memcpy_gigabytes_per_s()))
        for rival, rate in rivals:
            yield Row("load, warm", self._work, self._rate(load), "GB/s", rival, rate)

    def cold(self) -> Iterator[Row]:
        scouted = self._scout()
        for plain, seconds in scouted.items():
            yield Row("plain read, cold", str(plain), self._rate(seconds), "GB/s")
        best = min(scouted, key=lambda plain: scouted[plain])
        loads: dict[str, Way] = {"load": self.load}
        if not torch.cuda.is_available():
            loads["load as float32"] = partial(self.load, "float32")  # the default on a CPU
        timed = self._by_turns({"plain read": partial(best.seconds, self.written.files), **loads})
        rival, rate = f"plain read, {best},", self._rate(timed["plain read"])
        for name in loads:
            yield Row(f"{name}, cold", self._work, self._rate(timed[name]), "GB/s", rival, rate, goal=GOAL)

    def _scout(self) -> dict[Plain, float]:
        """Seconds of each way to read that the disk supports, until the time is over."""
        scouted: dict[Plain, float] = {}
        since = time.perf_counter()
        for plain in PLAIN:
            try:
                scouted[plain] = self._cold(f"plain read, {plain}", partial(plain.seconds, self.written.files))
            except OSError as error:  # not every file system has O_DIRECT
                self.progress(f"loading: plain read, {plain}: {error.strerror}")
            if scouted and time.perf_counter() - since > SCOUT_S:
                break
        return scouted

    def load(self, dtype: str = "bfloat16") -> float:
        """Seconds to load the model as a node does, with a small cache and without graphs."""
        gc.collect()
        since = time.perf_counter()
        built = build_runner(
            NodeSettings(
                model=self.directory,
                dtype=dtype,
                device="auto",
                num_blocks=64,
                max_batch_tokens=16,
                max_batch_requests=1,
                cuda_graphs=False,
            )
        )
        if built.cache.view.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - since

    def _by_turns(self, ways: dict[str, Way]) -> dict[str, float]:
        """The shortest time of each way."""
        times: dict[str, list[float]] = {name: [] for name in ways}
        since = time.perf_counter()
        for index in range(ROUNDS):
            if index and time.perf_counter() - since > TURNS_S:
                break
            for name, way in ways.items():
                times[name].append(self._cold(name, way))
        return {name: min(each) for name, each in times.items()}

    def _cold(self, name: str, way: Way) -> float:
        if (cached := drop(self.written.files)) > CACHED_MAX:
            raise RuntimeError(f"{cached:.0%} of the files' pages stay in the page cache: this disk cannot be measured")
        seconds = way()
        self.progress(f"loading: {name}, cold: {self._rate(seconds):.2f} GB/s")
        return seconds

    def _rate(self, seconds: float) -> float:
        return self.written.num_bytes / seconds / 1e9

    @property
    def _work(self) -> str:
        return f"{self.written.name}, {self.written.num_bytes / 1e9:.1f} GB in {len(self.written.files)} files"


def main(arguments: Sequence[str]) -> None:
    gib = float(arguments[0]) if arguments else None
    directory = Path(arguments[1]) if len(arguments) > 1 else None
    rows: list[Row] = []
    try:
        rows.extend(run(lambda line: print(line, file=sys.stderr), gib, directory))
    finally:
        print_rows("Loading", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
