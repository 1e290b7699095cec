"""All targets, by name, in groups that start together."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Self

from tests.fuzz.target import AsyncTarget, Case, Target, Targets

_BOUND_S = 400.0  # wall time, so long that only what hangs takes it


@contextmanager
def _serving(make: Callable[[], AbstractAsyncContextManager[Mapping[str, AsyncTarget]]]) -> Iterator[Targets]:
    """Targets of a server whose event loop runs while an input is served."""
    with asyncio.Runner() as runner, ErrorLog() as errors:
        serving = make()
        made = runner.run(serving.__aenter__())
        try:
            yield {name: Target(each.make, partial(_run, runner, errors, each)) for name, each in made.items()}
        finally:
            runner.run(serving.__aexit__(None, None, None))


def _run(runner: asyncio.Runner, errors: "ErrorLog", target: AsyncTarget, case: Case) -> str | None:
    errors.lines.clear()

    async def bounded() -> str | None:
        return await asyncio.wait_for(target.parse(case), _BOUND_S)

    try:
        return runner.run(bounded())
    finally:
        assert not errors.lines, errors.lines[0]


# Names of targets, and the function that makes them. A process imports only the modules that it needs: torch is large.
_GROUPS = (
    (("converted", "error_details", "hello", "trailer"), "messages", "message_targets"),
    (("node_messages",), "machines", "machine_targets"),
    (("config", "safetensors", "index", "tokenizer", "addresses"), "files", "file_targets"),
    (("kv_file",), "kv_files", "kv_file_targets"),
    (("families", "quantization", "adapter", "tokenizer_forms", "gguf_file"), "model_files", "model_file_targets"),
    (("settings", "keys", "tokens", "certificates"), "settings", "setting_targets"),
    (("grammar", "chat_template", "outputs", "trace"), "texts", "text_targets"),
    (("gateway_grpc", "gateway_http", "http_bytes"), "gateway", "gateway_targets"),
    (("node_grpc",), "nodes", "node_targets"),
)
NAMES = tuple(name for names, _, _ in _GROUPS for name in names)


def _make(module: str, function: str) -> AbstractContextManager[Targets]:
    made = getattr(import_module(f"tests.fuzz.{module}"), function)
    return _serving(made) if function in _ASYNC else made()


_ASYNC = ("gateway_targets", "node_targets")


@contextmanager
def one_target(name: str) -> Iterator[Target]:
    """A target, and what it needs."""
    with all_targets(only=name) as targets:
        yield targets[name]


@contextmanager
def all_targets(*, only: str = "") -> Iterator[Targets]:
    """All targets, or those that start together with one of them."""
    os.environ["GRPC_VERBOSITY"] = "NONE"  # it writes about addresses that are none
    with ExitStack() as stack:
        made: dict[str, Target] = {}
        for names, module, function in _GROUPS:
            if not only or only in names:
                found = stack.enter_context(_make(module, function))
                assert tuple(sorted(found)) == tuple(sorted(names)), found.keys()
                made |= found
        yield made


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
