"""Rows with drafts: a request gets the tokens and logprobs that decoding gives it, whatever is drafted, for every way
to draw and every kind of attention, in steps outside of graphs and in the buffers of graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import InternalError
from baton.core.types import TokenOutput
from baton.engine.batch import Batch, BatchRow, ScoreRow
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.runner import ModelRunner
from baton.engine.pooling import PoolRow
from baton.engine.request import int_array
from baton.engine.sampling.row import GREEDY_ROW
from baton.models.adapters.adapter import read_adapter
from baton.settings.node_config import NodeSettings
from tests.unit.engine.drafted import DRAFTERS, Asked, Outputs, assert_same, right, token_by_token, with_drafts
from tests.unit.engine.driver import Driver, runner_of
from tests.unit.engine.tiny import BLOCK_SIZE, build, prompt_of
from tests.unit.models.lora import save_adapter
from tests.unit.models.tiny import save_tiny

GRAPHS = GraphSettings(max_requests=64, max_context_tokens=96, max_tokens=256)
END_TOKENS = frozenset(range(3, 30))
COUNT = 14
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 0},
    "drawn": {"temperature": 1.0, "seed": 5},
    "min_p": {"temperature": 1.5, "min_p": 0.1, "seed": 2**64 - 3},
    "top": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 7, "logprobs": 2},
    "penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3, "logprobs": 3},
    "penalised and drawn": {"frequency_penalty": 1.5, "temperature": 0.8, "seed": 11},
    "biased": {"logit_bias": {5: 3.0, 9: -100.0}, "logprobs": 1},
    "long enough": {"min_tokens": 7, "logprobs": 1},
    "long enough and drawn": {"min_tokens": 5, "temperature": 1.0, "seed": 3, "presence_penalty": 0.5},
}
ASKED = {
    name: Asked(prompt_of(3 + 4 * seed, seed=seed), sampling) for seed, (name, sampling) in enumerate(SAMPLINGS.items())
}
KINDS = pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["eager", "padded"])


def prepared(built: BuiltRunner, graphs: GraphSettings | None) -> ModelRunner:
    runner = runner_of(built, graphs=graphs)
    runner.prepare()
    return runner


@pytest.fixture(scope="module")
def shared(llama: tuple[Path, Any]) -> BuiltRunner:
    return build(llama[0], num_blocks=384)


@pytest.fixture(scope="module")
def expected(shared: BuiltRunner) -> Outputs:
    return token_by_token(prepared(shared, None), ASKED, COUNT, end_token_ids=END_TOKENS)


@KINDS
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_any_drafts_give_the_tokens_of_decoding(
    shared: BuiltRunner, expected: Outputs, drafter: str, graphs: GraphSettings | None
) -> None:
    runner = prepared(shared, graphs)
    outputs, steps = with_drafts(runner, ASKED, expected, DRAFTERS[drafter](), end_token_ids=END_TOKENS)
    assert_same(outputs, expected)
    kept = {"right": 3, "wrong at 0": 0, "wrong at 1": 1, "wrong at 2": 2}
    if drafter in kept:
        assert steps == 1 + -(-(COUNT - 1) // (1 + kept[drafter]))
    if graphs is None:
        assert runner.launches == {"eager": steps, "decode_graph": 0, "prompt_graph": 0}
    else:
        assert runner.launches == {"eager": 0, "decode_graph": steps - 1, "prompt_graph": 1}


def test_the_ways_to_draw_change_the_tokens(expected: Outputs) -> None:
    """Otherwise the tests above would show little."""
    early = [token.token_id for token in expected["long enough"]]
    assert not END_TOKENS.intersection(early[:7])
    assert END_TOKENS.intersection(early[7:])
    assert len({tuple(token.token_id for token in tokens) for tokens in expected.values()}) == len(expected)


@KINDS
@pytest.mark.parametrize(
    "family", ["deepseek-v2", "deepseek-v32", "mistral-window", "gpt-oss", "gemma3", "llama4", "bloom"]
)
def test_every_kind_of_attention_gives_the_tokens_of_decoding(
    family: str, tmp_path: Path, graphs: GraphSettings | None
) -> None:
    save_tiny(family, tmp_path)
    built = build(tmp_path, num_blocks=384)
    names = ("greedy", "top", "penalised", "long enough")
    asked = {name: Asked(prompt_of(5 + 6 * seed, seed=seed), SAMPLINGS[name]) for seed, name in enumerate(names)}
    expected = token_by_token(prepared(built, None), asked, COUNT, end_token_ids=END_TOKENS)
    runner = prepared(built, graphs)
    for drafter in DRAFTERS.values():
        assert_same(with_drafts(runner, asked, expected, drafter(), end_token_ids=END_TOKENS)[0], expected)


@KINDS
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next", "kimi-linear", "nemotron-h"])
def test_recurrent_states_give_the_bits_of_decoding(family: str, tmp_path: Path, graphs: GraphSettings | None) -> None:
    """Each state comes from the last draft that is right."""
    save_tiny(family, tmp_path)
    settings = NodeSettings(model=tmp_path, num_blocks=384, block_size=4, device="cpu", batch_invariant=True)
    built = build_runner(settings)
    asked = {name: ASKED[name] for name in ("greedy", "top", "penalised")}
    expected = token_by_token(prepared(built, None), asked, COUNT)
    for drafter in ("wrong at 1", "any"):
        assert with_drafts(prepared(built, graphs), asked, expected, DRAFTERS[drafter]())[0] == expected


@KINDS
@pytest.mark.parametrize("family", ["llama", "deepseek-v2"])
def test_drafts_in_a_cache_of_fp8_give_the_tokens_of_decoding(
    family: str, tmp_path: Path, graphs: GraphSettings | None
) -> None:
    save_tiny(family, tmp_path)
    built = build_runner(
        NodeSettings(model=tmp_path, num_blocks=384, block_size=BLOCK_SIZE, device="cpu", kv_cache_dtype="fp8_e4m3")
    )
    asked = {"greedy": ASKED["greedy"], "top": ASKED["top"]}
    expected = token_by_token(prepared(built, None), asked, COUNT)
    for drafter in DRAFTERS.values():
        assert_same(with_drafts(prepared(built, graphs), asked, expected, drafter())[0], expected)


@KINDS
@pytest.mark.parametrize("family", ["mistral-window", "deepseek-v3-yarn", "gpt-oss"])
def test_drafts_have_the_bits_of_decodes_in_batch_invariant_mode(
    family: str, tmp_path: Path, graphs: GraphSettings | None
) -> None:
    save_tiny(family, tmp_path)
    settings = NodeSettings(model=tmp_path, num_blocks=384, block_size=4, device="cpu", batch_invariant=True)
    built = build_runner(settings)
    asked = {name: ASKED[name] for name in ("greedy", "top", "penalised")}
    expected = token_by_token(prepared(built, None), asked, COUNT)
    for drafter in DRAFTERS.values():
        outputs, _ = with_drafts(prepared(built, graphs), asked, expected, drafter())
        assert outputs == expected  # logprobs too


@KINDS
def test_rows_with_adapters_give_the_tokens_of_decoding(tmp_path: Path, graphs: GraphSettings | None) -> None:
    save_tiny("llama-llama3-tied", tmp_path / "base")
    settings = NodeSettings(
        model=tmp_path / "base", num_blocks=384, block_size=4, device="cpu", max_adapters=2, max_adapter_rank=8
    )
    built = build_runner(settings)
    bank = built.runner.adapters
    assert bank is not None
    for slot in range(2):
        directory = save_adapter(tmp_path / "base", tmp_path / f"adapter {slot}", seed=slot, rank=4 + slot)
        built.runner.load_adapter(slot, read_adapter(directory, bank.layers, max_rank=8))
    asked = {f"adapter {slot}": Asked(prompt_of(9), {"logprobs": 1}, adapter=slot) for slot in (-1, 0, 1)}
    expected = token_by_token(prepared(built, None), asked, COUNT)
    assert len({tuple(token.token_id for token in tokens) for tokens in expected.values()}) == 3
    for drafter in DRAFTERS.values():
        assert_same(with_drafts(prepared(built, graphs), asked, expected, drafter())[0], expected)


@KINDS
def test_drafts_next_to_decodes_prompts_scores_and_pools(
    shared: BuiltRunner, expected: Outputs, graphs: GraphSettings | None
) -> None:
    names = ("penalised", "drawn", "long enough", "top")
    driver = Driver(prepared(shared, graphs), end_token_ids=END_TOKENS)
    for name in names:
        driver.add(name, ASKED[name].prompt, **SAMPLINGS[name])
        driver.step(name)
    # The test's own prompts have blocks that the driver leaves to nobody.
    scored, pooled = prompt_of(9, seed=20), prompt_of(6, seed=21)
    rows = (
        BatchRow("scored", int_array(scored), 0, int_array([0, 1, 3]), GREEDY_ROW),
        BatchRow("pooled", int_array(pooled), 0, int_array([4, 6]), None),
    )
    alone = prepared(shared, None)
    others = {"scores": ((0, ScoreRow(int_array(scored[1:]), 2)),), "pools": ((1, PoolRow(1, 5)),)}
    first = alone.launch(Batch(0, rows, **others))  # type: ignore[arg-type]
    (token, _), scores, pools = first.wait(), first.scores, first.pools

    launched = driver.launch
    seen: list[Any] = []

    def launch_with_prompts(batch: Batch) -> Any:
        """Puts the prompts between the driver's rows with drafts."""
        mine = batch.shared_rows
        between = 2
        assert [bool(row.num_drafts) for row in mine] == [False, True, True, True]
        merged = (*mine[:between], *rows, *mine[between:])
        scored_at, pooled_at = between, between + 1
        step = launched(
            Batch(0, merged, scores=((scored_at, others["scores"][0][1]),), pools=((pooled_at, others["pools"][0][1]),))  # type: ignore[arg-type]
        )
        results = step.wait()
        seen.append((results[scored_at], results[pooled_at], step.scores[scored_at], step.pools[pooled_at]))
        del results[between : between + 2]
        step.wait = lambda: results  # type: ignore[method-assign]
        return step

    driver.launch = launch_with_prompts  # type: ignore[method-assign]
    coming = {name: [token.token_id for token in expected[name][1:]] for name in names}
    drafts = {
        "penalised": coming["penalised"][:4],
        "long enough": [coming["long enough"][0], 1, 1],
        "top": [1, *coming["top"][1:3]],
    }
    driver.step(*names, drafts=drafts)
    for name, count in {"penalised": 6, "drawn": 2, "long enough": 3, "top": 2}.items():
        outputs = driver.outputs(name)
        assert len(outputs) == count
        assert_same({name: outputs}, {name: expected[name][:count]})
    ((ours, nothing, our_scores, our_pools),) = seen
    assert isinstance(ours, TokenOutput)
    assert isinstance(token, TokenOutput)
    assert ours.token_id == token.token_id
    assert nothing is None
    assert [each.logprob for each in our_scores] == pytest.approx([each.logprob for each in scores[0]], abs=1e-4)
    assert our_pools == pytest.approx(pools[1], abs=1e-4)


def test_more_draws_than_the_buffers_have_run_outside_of_graphs(shared: BuiltRunner, expected: Outputs) -> None:
    """Also more than the buffers have places for tokens."""
    runner = prepared(shared, GraphSettings(max_requests=16, max_context_tokens=96, max_tokens=256))
    outputs, steps = with_drafts(runner, ASKED, expected, right(9), end_token_ids=END_TOKENS)
    assert_same(outputs, expected)
    assert steps == 3
    assert runner.launches["eager"] == 2  # of 9 x 10 and 9 x 3 draws


@KINDS
def test_steps_without_drafts_follow_those_with_drafts(
    shared: BuiltRunner, expected: Outputs, graphs: GraphSettings | None
) -> None:
    """Steps that are launched ahead read tokens on the device, which must be those of the step before."""
    driver = Driver(prepared(shared, graphs), ahead=True, end_token_ids=END_TOKENS)
    names = list(ASKED)
    for name in names:
        driver.add(name, ASKED[name].prompt, **SAMPLINGS[name])
    driver.step(*names)
    for _ in range(3):
        driver.finish()
        done = {name: len(driver.outputs(name)) for name in names}
        coming = {name: [token.token_id for token in expected[name][done[name] :]] for name in names}
        driver.step(*names, drafts={name: [*coming[name][:1], 1] for name in names[::2]})
        driver.finish()
        driver.step(*names)
        driver.step(*reversed(names))
    for name in names:
        outputs = driver.outputs(name)
        assert len(outputs) >= 10
        assert_same({name: outputs[:COUNT]}, {name: expected[name][: len(outputs)]})


WRONG = 1  # a token whose embedding is NaN


@KINDS
def test_logits_that_are_not_finite_fail_the_request_only_if_they_count(
    llama: tuple[Path, Any], graphs: GraphSettings | None
) -> None:
    built = build(llama[0], num_blocks=384)
    with torch.inference_mode():
        built.runner.model.model.embed_tokens.weight[WRONG] = torch.nan
    asked = {"a": Asked(prompt_of(7), {"logit_bias": {WRONG: -100.0}}), "b": Asked(prompt_of(5, seed=3))}
    expected = token_by_token(prepared(built, None), asked, COUNT)
    runner = prepared(built, graphs)
    outputs, _ = with_drafts(runner, asked, expected, lambda coming: [*coming[:1], WRONG, WRONG])
    assert_same(outputs, expected)
    rows = [
        BatchRow(name, int_array([WRONG, 5]), 0, int_array([block]), GREEDY_ROW, num_drafts=1)
        for name, block in (("c", 0), ("d", 1))
    ]
    rows[1] = rows[1]._replace(token_ids=int_array([4, 5]))
    failed, fine = runner.run(Batch(0, tuple(rows)))
    assert isinstance(failed, InternalError)
    assert "not finite" in str(failed)
    assert isinstance(fine, tuple)


def test_a_step_with_drafts_has_no_token_that_the_host_does_not_know(shared: BuiltRunner) -> None:
    runner = prepared(shared, None)
    drafted = BatchRow("a", int_array([3, 4]), 0, int_array([0]), GREEDY_ROW, num_drafts=1)
    pending = BatchRow("b", int_array([0]), 1, int_array([0]), GREEDY_ROW, token_source=0)
    with pytest.raises(AssertionError, match=r"not those of \['b'\]"):
        runner.launch(Batch(0, (pending, drafted)))
    runner.run(Batch(1, (drafted,)))
    with pytest.raises(AssertionError, match=r"not those of \['b'\]"):
        runner.launch(Batch(2, (pending,)))
    assert isinstance(runner.run(Batch(3, (pending._replace(token_source=None),)))[0], TokenOutput)
    runner.run(Batch(4, (pending,)))
