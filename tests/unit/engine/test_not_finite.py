"""A request whose logits are not finite fails; the requests next to it get the tokens that they get alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import InternalError
from baton.core.sampling import ResolvedSampling
from baton.engine.device.graphs import GraphSettings
from tests.unit.engine.driver import runner_of
from tests.unit.engine.tiny import build, prompt_of, request, running

WRONG = 1  # a token whose embedding is NaN; `prompt_of` gives none below 3


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 3}, {"logprobs": 2}, {"presence_penalty": 0.5, "logprobs": 1}]
)
@pytest.mark.parametrize("padded", [False, True])
async def test_a_request_without_finite_logits_fails_alone(
    llama: tuple[Path, Any], sampling: dict[str, Any], *, padded: bool
) -> None:
    built = build(llama[0])
    graphs = GraphSettings(max_requests=8, max_context_tokens=64) if padded else None
    built = built._replace(runner=runner_of(built, graphs=graphs))
    with torch.inference_mode():
        built.runner.model.model.embed_tokens.weight[WRONG] = torch.nan
    given: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logit_bias": {WRONG: -100.0}}
    params = ResolvedSampling(**given | sampling)
    good, late = prompt_of(9, seed=1), prompt_of(11, seed=2)
    async with running(built) as (engine, events):
        for name in ("good", "late"):
            engine.submit(request(f"{name} alone", {"good": good, "late": late}[name], params))
            await events.finished(f"{name} alone")
        engine.submit(request("good", good, params))
        engine.submit(request("wrong", (*good[:-1], WRONG), params))
        await events.finished("wrong")
        engine.submit(request("late", late, params))
        await events.finished("good", "late")
    assert events.ids("wrong") == []
    error = events.errors.pop("wrong")
    assert isinstance(error, InternalError)
    assert "logits for the next token are not finite" in str(error)
    assert events.errors == {}
    for name in ("good", "late"):
        assert events.ids(name) == events.ids(f"{name} alone")
        assert len(events.ids(name)) == 12
