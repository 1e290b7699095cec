"""An engine whose model drafts with an EAGLE-3 head gives the tokens that decoding alone gives, in fewer steps if the
head is good; and which nodes load a head."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from baton.core.errors import ConfigError
from baton.engine.build import build_runner
from baton.engine.draft_layer import with_draft_layer
from baton.engine.request import EngineRequest
from baton.engine.speculation.speculator import Speculator
from baton.models.adapters.adapter import read_adapter
from baton.models.families.reader import read_config
from baton.settings.node_config import NodeSettings
from tests.unit.engine.ahead import one_step_at_a_time, varied_requests
from tests.unit.engine.test_engine_mtp import LayerOnly, answered, built_of, engine_of
from tests.unit.engine.tiny import greedy, prompt_of, request
from tests.unit.models.lora import save_adapter
from tests.unit.models.tiny import save_tiny
from tests.unit.models.tiny_eagle import DISTANCE, save_with_good_head, save_with_head
from tests.unit.models.tiny_mtp import save_with_mtp

COUNT = 40


class Saved(NamedTuple):
    model: Path
    head: Path

    def speculating(self, **given: Any) -> dict[str, Any]:
        return {"draft_head": self.head, "speculation": "always"} | given


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("good")
    save_with_good_head(directory, directory / "head")
    return Saved(directory, directory / "head")


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt-oss"])
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("drawn")
    save_with_head(request.param, directory, directory / "head")
    return Saved(directory, directory / "head")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
async def test_every_way_to_draw_gives_the_tokens_of_decoding(drawn: Saved, kv_cache_dtype: str) -> None:
    requests = list(varied_requests())
    expected = one_step_at_a_time(built_of(drawn.model, kv_cache_dtype=kv_cache_dtype), requests)
    built = built_of(drawn.model, **drawn.speculating(kv_cache_dtype=kv_cache_dtype))
    assert built.runner.facts.drafts
    events = await answered(built, requests, prefix_cache=True)
    for name, tokens in expected.items():
        assert events.ids(name) == [each.token_id for each in tokens], name
    assert events.draft_counts[0] > 0


async def test_a_good_head_saves_most_steps(good: Saved) -> None:
    requests = [request(f"r{seed}", prompt_of(30 + seed, seed=seed), greedy(COUNT)) for seed in range(4)]
    expected = one_step_at_a_time(built_of(good.model), requests)
    built = built_of(good.model, **good.speculating())
    async with engine_of(built, LayerOnly(always=True)) as (engine, events):
        for one in requests:
            engine.submit(one)
        await events.finished(*expected)
    for name, tokens in expected.items():
        assert events.ids(name) == [each.token_id for each in tokens]
    drafted, accepted = events.draft_counts
    assert accepted > 0.9 * drafted
    # Alone, the requests would take a step for each token.
    assert len(events.steps) < 0.6 * COUNT


async def test_preempted_requests_have_the_heads_kv_again(good: Saved) -> None:
    """The cache has room for two of four requests, so some lose their blocks and compute them again."""
    requests = [request(f"r{seed}", prompt_of(40 + seed, seed=seed), greedy(COUNT)) for seed in range(4)]
    expected = one_step_at_a_time(built_of(good.model), requests)
    built = built_of(good.model, **good.speculating(num_blocks=26))
    async with engine_of(built, LayerOnly(always=True), prefix_cache=False) as (engine, events):
        for one in requests:
            engine.submit(one)
        await events.finished(*expected)
        assert engine.load().preemptions > 0
    for name, tokens in expected.items():
        assert events.ids(name) == [each.token_id for each in tokens]
    drafted, accepted = events.draft_counts
    assert accepted > 0.9 * drafted


async def test_a_prefix_from_the_cache_has_the_heads_kv(good: Saved) -> None:
    """Every draft token needs KV of `DISTANCE` places before, which the second request has from the cache."""
    prompt = prompt_of(64 + DISTANCE // 4, seed=9)
    built = built_of(good.model, **good.speculating())
    async with engine_of(built, LayerOnly(always=True), prefix_cache=True) as (engine, events):
        for turn in range(2):
            before = events.draft_counts
            engine.submit(request(f"r{turn}", prompt, greedy(DISTANCE // 2)))
            await events.finished(f"r{turn}")
            drafted, accepted = (now - then for now, then in zip(events.draft_counts, before, strict=True))
            assert accepted > 0.9 * drafted
        assert events.started["r1"].cached_tokens >= 64
    assert events.ids("r0") == events.ids("r1")


async def test_requests_with_an_adapter_get_its_tokens(drawn: Saved, tmp_path: Path) -> None:
    targets = ("layers.0.self_attn.q_proj", "layers.1.self_attn.o_proj")
    directory = save_adapter(drawn.model, tmp_path / "adapter", seed=3, targets=targets)
    answers = []
    for given in ({}, drawn.speculating()):
        built = built_of(drawn.model, max_adapters=1, max_adapter_rank=8, **given)
        assert built.runner.adapters is not None
        assert not any("midlayer" in name for name in built.runner.adapters.layers)
        adapter = read_adapter(directory, built.runner.adapters.layers, max_rank=8)
        async with engine_of(built, Speculator(always=True) if given else None, num_adapters=1) as (engine, events):
            used = await engine.load_adapter("a", adapter)
            for name, adapter_of in (("base", None), ("adapted", used)):
                # Its two best logits are never within 0.01; with other prompts they are, and steps with drafts round.
                engine.submit(EngineRequest(name, prompt_of(20, seed=12), greedy(COUNT), adapter=adapter_of))
            await events.finished("base", "adapted")
        answers.append((events.ids("base"), events.ids("adapted")))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_blocks_with_the_kv_of_one_head_are_others_than_those_of_another(good: Saved, drawn: Saved) -> None:
    plain, speculating = built_of(good.model), built_of(good.model, **good.speculating())
    assert (plain.runner.model.eagle is None, speculating.runner.model.eagle is None) == (True, False)
    assert (plain.cache.draft is None, speculating.model_spec.draft is None) == (True, False)
    assert plain.runner.facts.identity != speculating.runner.facts.identity
    assert plain.identity.draft_digest == ""
    digests = {built_of(each.model, **each.speculating()).identity.draft_digest for each in (good, drawn)}
    assert len(digests - {""}) == 2


def refused(directory: Path, **given: Any) -> ConfigError:
    settings = NodeSettings.model_validate({"model": directory, "device": "cpu"} | given)
    with pytest.raises(ConfigError) as found:
        with_draft_layer(read_config(directory), settings)
    assert found.value.field == "draft_head"
    assert found.value.allowed
    assert "--draft-head" in found.value.cure
    return found.value


@pytest.mark.parametrize("speculation", ["off", "text"])
def test_a_head_needs_a_node_that_drafts_with_it(good: Saved, speculation: str) -> None:
    error = refused(good.model, draft_head=good.head, speculation=speculation)
    assert f"speculation is {speculation}" in str(error)
    assert "--speculation auto" in error.cure


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek-v3", "latent attention"),
        ("falcon-new", "do not show the hidden states"),
        ("qwen3-next", "recurrent layers"),
    ],
)
def test_models_whose_layers_a_head_cannot_read_say_so(name: str, reason: str, good: Saved, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    assert reason in str(refused(tmp_path, draft_head=good.head, speculation="auto"))


def test_a_head_comes_before_the_checkpoints_own_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_with_mtp("glm4-moe", tmp_path, changed={"num_hidden_layers": 5})
    save_with_head("glm4-moe", tmp_path / "other", tmp_path / "head")
    given = {"model": tmp_path, "draft_head": tmp_path / "head", "speculation": "auto", "num_blocks": 8}
    with caplog.at_level(logging.WARNING):
        built = build_runner(NodeSettings.model_validate({"device": "cpu"} | given))
    assert (built.runner.model.mtp is None, built.runner.model.eagle is None) == (True, False)
    assert not caplog.records
