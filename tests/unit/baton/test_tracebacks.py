"""Errors whose tracebacks are dropped keep nothing alive."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from baton.core.tracebacks import drop_tracebacks


class Connection:
    """Stands for what a frame holds."""


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def _fails_while_it_holds(connection: Connection) -> None:
    async def fails() -> None:
        raise ValueError(repr(connection))

    task = asyncio.create_task(fails())  # a cycle: this frame, the task, its error, the error's traceback
    await asyncio.wait([task])
    try:
        task.result()
    except ValueError as error:
        raise RuntimeError("the cause's frames hold it too") from error


async def _held_after_failure(*, drop: bool, group: bool) -> bool:
    connection = Connection()
    held = weakref.ref(connection)
    try:
        if group:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_fails_while_it_holds(connection))
        else:
            await _fails_while_it_holds(connection)
    except* RuntimeError as error:
        if drop:
            drop_tracebacks(error)
    del connection
    await asyncio.sleep(0)
    return held() is not None


@pytest.mark.parametrize("group", [False, True])
async def test_what_the_frames_hold_goes_without_the_collector(group: bool) -> None:
    assert await _held_after_failure(drop=False, group=group)
    gc.collect()
    assert not await _held_after_failure(drop=True, group=group)


def test_errors_that_refer_to_each_other_are_walked_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__cause__ = second, first
    drop_tracebacks(first)
    assert first.__traceback__ is None
    assert second.__traceback__ is None
