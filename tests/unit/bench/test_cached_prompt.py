"""The cached prompt whose host time is measured goes through all stages, and is found in the cache."""

from contextlib import closing

from baton.gateway.text.model import read_served_model
from baton.settings.config import DEMO_MODELS
from bench.cached_prompt import STAGES, measure


async def test_a_prompt_goes_through_all_stages_and_is_cached_but_for_its_last_block() -> None:
    with closing(read_served_model(DEMO_MODELS / "llama", None)) as model:
        found = await measure(model, 2048, rounds=2)
    assert tuple(found) == STAGES
