"""All targets, by name."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from random import Random
from typing import Self

from tests.fuzz.files import file_targets
from tests.fuzz.gateway import AsyncParse, gateway_targets
from tests.fuzz.messages import MESSAGE_TARGETS
from tests.fuzz.nodes import node_targets
from tests.fuzz.target import Parse


@contextmanager
def all_targets() -> Iterator[Mapping[str, Parse]]:
    """Those that serve share one event loop, which runs while an input is served."""
    with file_targets() as of_files, asyncio.Runner() as runner, ErrorLog() as errors:
        stack = AsyncExitStack()
        try:
            serving: dict[str, AsyncParse] = {}
            for targets in (gateway_targets, node_targets):
                serving |= runner.run(stack.enter_async_context(targets()))
            yield {
                **MESSAGE_TARGETS,
                **of_files,
                **{name: _served(runner, errors, parse) for name, parse in serving.items()},
            }
        finally:
            runner.run(stack.aclose())


def _served(runner: asyncio.Runner, errors: "ErrorLog", parse: AsyncParse) -> Parse:
    def run(random: Random) -> None:
        errors.lines.clear()
        try:
            runner.run(parse(random))
        finally:
            assert not errors.lines, errors.lines[0]

    return run


class ErrorLog(logging.Handler):
    """Errors in the log: of handlers that failed, and of tasks that nobody awaits."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
