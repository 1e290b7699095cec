"""Breaks the engine's steps for prompts of one token, in a node's process."""

from pathlib import Path
from typing import Any

from baton.engine.batch import Batch
from baton.engine.device.runner import ModelRunner

BAD_TOKEN = 13


def break_steps(marker: Path | None = None) -> None:
    """From now on each step fails that has a prompt of bad tokens.

    Args:
        marker: a file that is made with the first failure, on whichever node: then no other step fails.
    """
    launch = ModelRunner.launch

    def launch_or_break(self: ModelRunner, batch: Batch, on_mark: Any = None) -> Any:
        bad = any(list(row.token_ids[:3]) == [BAD_TOKEN] * 3 for row in batch.shared_rows)
        if bad and (marker is None or _makes(marker)):
            raise RuntimeError("the kernel broke")
        return launch(self, batch, on_mark)

    ModelRunner.launch = launch_or_break  # type: ignore[method-assign]


def _makes(marker: Path) -> bool:
    """Whether this call makes the file."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
