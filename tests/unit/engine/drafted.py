"""Outputs of a runner token by token, and the same outputs with drafts that are right, wrong, or either."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import pytest

from baton.core.types import TokenOutput
from baton.engine.device.runner import ModelRunner
from tests.unit.engine.driver import Driver
from tests.unit.models.tiny import VOCAB_SIZE

# The drafts for a request, from the tokens that it gets next.
Drafter: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
Outputs: TypeAlias = dict[str, list[TokenOutput]]


@dataclass(frozen=True)
class Asked:
    """A request on a driver."""

    prompt: Sequence[int]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    owner: int = 0
    adapter: int = -1


def right(count: int) -> Drafter:
    return lambda coming: coming[:count]


def wrong_at(place: int, count: int, vocab_size: int = VOCAB_SIZE) -> Drafter:
    """`count` drafts that are right but for one."""

    def drafter(coming: Sequence[int]) -> list[int]:
        drafts = list(coming[:count])
        if place < len(drafts):
            drafts[place] = (drafts[place] + 1) % vocab_size
        return drafts

    return drafter


def any_drafts(seed: int, most: int = 4, vocab_size: int = VOCAB_SIZE) -> Drafter:
    """Up to a few drafts, mostly right ones."""
    draw = random.Random(seed)

    def drafter(coming: Sequence[int]) -> list[int]:
        drafts = coming[: draw.randrange(most + 1)]
        return [token if draw.random() < 0.8 else draw.randrange(vocab_size) for token in drafts]

    return drafter


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "right": lambda: right(3),
    **{f"wrong at {place}": partial(wrong_at, place, 3) for place in range(3)},
    "any": lambda: any_drafts(5),
}


def driver_of(runner: ModelRunner, asked: Mapping[str, Asked], **given: Any) -> Driver:
    driver = Driver(runner, **given)
    for name, each in asked.items():
        driver.add(name, each.prompt, owner=each.owner, adapter=each.adapter, **each.sampling)
    return driver


def token_by_token(runner: ModelRunner, asked: Mapping[str, Asked], count: int, **given: Any) -> Outputs:
    """`count` tokens of each request."""
    driver = driver_of(runner, asked, **given)
    for _ in range(count):
        driver.step(*asked)
    return {name: driver.outputs(name) for name in asked}


def with_drafts(
    runner: ModelRunner, asked: Mapping[str, Asked], expected: Outputs, drafter: Drafter, **given: Any
) -> tuple[Outputs, int]:
    """As many tokens of each request as are expected, and the number of steps that they took."""
    driver = driver_of(runner, asked, **given)
    steps = 0
    while missing := [name for name in asked if len(driver.outputs(name)) < len(expected[name])]:
        # A draft of the last token would give one token more than are expected.
        coming = {name: expected[name][len(driver.outputs(name)) : -1] for name in missing}
        drafts = (
            {name: drafter([token.token_id for token in tokens]) for name, tokens in coming.items()} if steps else {}
        )
        driver.step(*missing, drafts=drafts)
        steps += 1
    return {name: driver.outputs(name)[: len(tokens)] for name, tokens in expected.items()}, steps


def assert_same(ours: Outputs, expected: Outputs) -> None:
    for name, tokens in expected.items():
        assert [token.token_id for token in ours[name]] == [token.token_id for token in tokens], name
        for our, their in zip(ours[name], tokens, strict=True):
            assert our.index == their.index
            assert our.logprob == pytest.approx(their.logprob, abs=1e-4)
            assert [token_id for token_id, _ in our.top_logprobs] == [token_id for token_id, _ in their.top_logprobs]
            values = [value for _, value in our.top_logprobs], [value for _, value in their.top_logprobs]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
