"""Breaks the start of a node of several ranks: at one stage, on one rank, in one way. Then nothing can be closed any
more: every teardown hangs, as NCCL's does when a rank is gone.

`python -m tests.integration.broken_start FAULT ...` runs what follows as a rank above 0.
"""

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, NoReturn

from baton.node.ranks import child
from tests.warm_children import keep_children_warm

# The call with which each stage begins, in the order of the stages.
STAGES = MappingProxyType(
    {
        "import": "",
        "settings": "baton.node.ranks.join:rank_device",
        "process group": "torch.distributed:init_process_group",
        "configurations": "baton.engine.runner_plan:check_same_config",
        "identity": "baton.engine.build:check_same_files",
        "weights": "baton.models.loading.loader:read_into",
        "cache": "baton.engine.build:PagedKVCache",
        "calibration": "baton.engine.calibration:measure_costs",
        "transport": "kvtransfer.transfer:KVTransfer.start",
        "warm-up": "baton.engine.device.runner:ModelRunner.prepare",
        "listen": "baton.rpc.server:GrpcServer.start",
        "ready": "baton.node.process:write_ready_file",
    }
)
ON_GPU = ("calibration",)
OF_RANK_0 = ("listen", "ready")
BROKEN = "the test broke it"


@dataclass(frozen=True)
class StartFault:
    """A fault of one rank at one stage of a start.

    Args:
        way: a name of `WAYS`.
        pids: an existing folder, where each rank makes a file with its process id as name.
        hangs: whether every teardown hangs.
    """

    stage: str
    rank: int
    way: str
    pids: Path
    hangs: bool = True

    def install(self, rank: int) -> None:
        """In the process of that rank, before it starts."""
        (self.pids / str(os.getpid())).touch()
        if self.hangs and self.stage != "import":
            _hang_teardowns()
        if rank != self.rank:
            return
        if self.stage == "import":
            sys.meta_path.insert(0, BreaksTorch(WAYS[self.way]))
        else:
            _break(STAGES[self.stage], WAYS[self.way])


@dataclass(frozen=True)
class BreaksTorch(MetaPathFinder):
    """Fails when torch is imported."""

    fail: Callable[[], None]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "torch":
            self.fail()


def break_start(fault: StartFault, *, leads: bool = True) -> None:
    """In the process that starts the ranks of a host.

    Args:
        leads: it is rank 0 itself.
    """
    from baton.node.ranks import group, host

    if leads and fault.stage != "import":
        keep_children_warm(1)
    start = host.worker_command

    def start_broken(calls: int, steps: int, *, model: Path) -> list[str]:
        # python -P -m baton.node.ranks.child PARENT MODULE ...
        python, _, _, _, *rest = start(calls, steps, model=model)
        return [python, "-P", "-m", __name__, json.dumps({**asdict(fault), "pids": str(fault.pids)}), *rest]

    group.worker_command = host.worker_command = start_broken  # type: ignore[attr-defined]
    if leads:
        fault.install(0)


def pids_in(folder: Path) -> list[int]:
    """The processes of the ranks that have started, the leader's first."""
    return [int(path.name) for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)]


def main() -> None:
    given = json.loads(sys.argv.pop(1))
    StartFault(**{**given, "pids": Path(given["pids"])}).install(1)
    child.main()


def _break(name: str, fail: Callable[[], None]) -> None:
    """Lets a function of ours fail when it is called."""
    place, _, attribute = name.rpartition(":" if "." not in name.partition(":")[2] else ".")
    owner = resolve_name(place)

    def failing(*_: Any, **__: Any) -> NoReturn:
        fail()
        raise AssertionError("the process continues")

    assert callable(getattr(owner, attribute)), f"{name} is there to be broken"
    setattr(owner, attribute, failing)


def _hang_teardowns() -> None:
    from torch import distributed

    distributed.destroy_process_group = _hang  # type: ignore[assignment]
    atexit.register(_hang)
    threading.Thread(target=_hang, name="never-ends").start()


def _hang(*_: Any) -> None:
    threading.Event().wait()


def _raise() -> None:
    raise ValueError(BROKEN)


def _raise_setting() -> None:
    from baton.core.errors import ConfigError

    raise ConfigError(BROKEN)


def _lack_memory() -> None:
    raise RuntimeError(f"CUDA out of memory. {BROKEN}")


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    _hang()  # until all threads have stopped


WAYS: MappingProxyType[str, Callable[[], None]] = MappingProxyType(
    {
        "error": _raise,
        "setting": _raise_setting,
        "memory": _lack_memory,
        "exit": lambda: os._exit(7),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hang": _hang,
        "stop": _stop,
    }
)

if __name__ == "__main__":
    main()
