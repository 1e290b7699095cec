"""On a GPU a step runs while the next one is scheduled. The tokens equal those of one step at a time."""

import asyncio

import pytest

from baton.settings.config import DEMO_MODELS
from tests.gpu.demo import build_demo
from tests.unit.engine.ahead import one_step_at_a_time, varied_requests
from tests.unit.engine.tiny import EventRecorder, running

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_tokens_are_those_of_one_step_at_a_time(model: str, *, cuda_graphs: bool) -> None:
    built = build_demo(DEMO_MODELS / model, dtype="float32", cuda_graphs=cuda_graphs)
    built.runner.prepare()
    requests = list(varied_requests())
    expected = one_step_at_a_time(built, requests)

    async def ahead() -> EventRecorder:
        async with running(built, max_batch_tokens=24, prefix_cache=False) as (engine, events):
            for one in requests:
                engine.submit(one)
            await events.finished(*expected)
        return events

    events = asyncio.run(ahead())
    assert events.errors == {}
    for name, tokens in expected.items():
        assert events.ids(name) == [token.token_id for token in tokens]
        assert [token.index for token in events.tokens[name]] == list(range(len(tokens)))
