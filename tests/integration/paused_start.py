"""Pauses a node's start at one stage, in its process: first the start alone, then the whole interpreter.

Compiling kernels and capturing graphs keep the interpreter's lock for seconds; so does this.
"""

import asyncio
import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.node import process
from baton.node.assembly import Node

_POLL_S = 0.005


@dataclass(frozen=True)
class PausedStart:
    """Used by the test and, pickled, by the node.

    Args:
        folder: an existing one, for this node only.
        stage: "looking for the model", "loading weights" or "starting engine".
    """

    folder: Path
    stage: str

    def prepare(self) -> None:
        """In the node's process, before it starts."""
        os.mkfifo(self.folder / "release")
        if self.stage == "starting engine":
            enter = Node.__aenter__

            async def paused_enter(node: Node) -> Node:
                await asyncio.to_thread(self._wait)
                self._pause()
                return await enter(node)

            Node.__aenter__ = paused_enter  # type: ignore[assignment, method-assign]
            return
        name = "model_directory" if self.stage == "looking for the model" else "load"
        original = getattr(process, name)

        def paused(*arguments: Any, **named: Any) -> Any:
            if name == "load":
                named["supervisor"].report(self.stage, done=2, total=5)
            self._wait()
            self._pause()
            return original(*arguments, **named)

        setattr(process, name, paused)

    def pause_interpreter(self) -> None:
        """In the test: no Python runs in the node from now on."""
        (self.folder / "pause").touch()
        while not (self.folder / "paused").exists():
            time.sleep(_POLL_S)

    def release(self) -> None:
        """In the test: the node goes on."""
        with (self.folder / "release").open("wb") as fifo:
            fifo.write(b".")

    def _wait(self) -> None:
        while not (self.folder / "pause").exists():
            time.sleep(_POLL_S)

    def _pause(self) -> None:
        descriptor = os.open(self.folder / "release", os.O_RDWR)
        (self.folder / "paused").touch()
        # NOTE: PyDLL keeps the interpreter's lock in the call, which CDLL and `os.read` do not.
        ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), ctypes.c_size_t(1))
        os.close(descriptor)
