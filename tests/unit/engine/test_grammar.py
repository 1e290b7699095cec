"""Constrained requests on an engine: every output follows its grammar, whatever happens to the request on the way."""

import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, Grammar, GrammarKind
from baton.engine.build import BuiltRunner
from baton.engine.device.graphs import GraphSettings
from baton.engine.engine import Engine
from baton.settings.config import DEMO_MODELS, tokenizer_file
from tests.unit.engine.driver import runner_of
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import EventRecorder, build, request, running

EOS = 4095
PROMPT = tuple(range(40, 60))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["one", "two"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"},
            {"type": "const_string", "value": "."},
        ],
    },
}


def is_object(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
        and len(value["name"]) <= 8
        and value["kind"] in ("one", "two")
        and len(value["sizes"]) <= 3
        and all(isinstance(size, int) and 0 <= size <= 99 for size in value["sizes"])
    )


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


# Of each kind: the grammar, and what its outputs are.
GRAMMARS: dict[GrammarKind, tuple[str, Callable[[str], bool]]] = {
    GrammarKind.JSON_OBJECT: ("", lambda text: isinstance(json.loads(text), dict)),
    GrammarKind.JSON_SCHEMA: (json.dumps(SCHEMA), is_object),
    GrammarKind.REGEX: (r"(\d{1,3}\.){3}\d{1,3}", matches(r"(\d{1,3}\.){3}\d{1,3}")),
    GrammarKind.CHOICE: ('["positive", "negative", "neither one"]', matches("positive|negative|neither one")),
    GrammarKind.LARK: (
        'start: "(" NUMBER ("+" NUMBER){1,3} ")"\nNUMBER: /[0-9]{1,4}/',
        matches(r"\(\d+(\+\d+){1,3}\)"),
    ),
    GrammarKind.GBNF: ('root ::= "x" item{1,3}\nitem ::= " = " [a-f]{2,4}\n', matches("x( = [a-f]{2,4}){1,3}")),
    GrammarKind.STRUCTURAL_TAG: (
        json.dumps(TAGS),
        lambda text: text.startswith("<a>") and text.endswith("</a>.") and is_object(text[3:-5]),
    ),
}
SEEDS = range(2)


def constrained(kind: GrammarKind, seed: int | None, **given: Any) -> ResolvedSampling:
    greedy = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
    return ResolvedSampling(**{"max_tokens": 100, "grammar": Grammar(kind, GRAMMARS[kind][0]), **greedy, **given})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file(DEMO_MODELS / "llama")))


@pytest.fixture(scope="module")
def demo() -> BuiltRunner:
    return build(DEMO_MODELS / "llama", num_blocks=512, block_size=16)


async def generated(engine: Engine, events: EventRecorder, wanted: dict[str, ResolvedSampling]) -> dict[str, list[int]]:
    """The outputs of these requests in one batch."""
    for name, params in wanted.items():
        engine.submit(request(name, PROMPT, params))
    await events.finished(*wanted)
    assert not events.errors
    return {name: events.ids(name) for name in wanted}


async def alone(built: BuiltRunner, params: ResolvedSampling) -> list[int]:
    async with running(built) as (engine, events):
        return (await generated(engine, events, {"alone": params}))["alone"]


@asynccontextmanager
async def padded(built: BuiltRunner) -> AsyncIterator[tuple[Engine, EventRecorder]]:
    """An engine whose decodes run in the buffers of graphs."""
    events = EventRecorder()
    runner = runner_of(built, graphs=GraphSettings(max_requests=32, max_context_tokens=512))

    async with Engine(runner, limits(), on_step=events, grammars=built.grammars) as engine:
        yield engine, events


@pytest.mark.parametrize("how", [running, padded])
async def test_outputs_of_every_kind_follow_their_grammar(
    how: Callable[[BuiltRunner], Any], demo: BuiltRunner, tokenizer: Tokenizer
) -> None:
    wanted = {f"{kind} {seed}": constrained(kind, seed) for kind in GRAMMARS for seed in (None, *SEEDS)}
    async with how(demo) as (engine, events):
        outputs = await generated(engine, events, wanted)
    ended = 0
    for name, ids in outputs.items():
        if events.reasons[name] is FinishReason.STOP:
            ended += name.split()[0] != "json_object"  # its texts may be long
            assert ids[-1] == EOS
            assert GRAMMARS[GrammarKind(name.split()[0])][1](tokenizer.decode(ids[:-1])), name
    assert ended == (len(GRAMMARS) - 1) * (1 + len(SEEDS))


async def test_constrained_rows_leave_the_tokens_of_others_unchanged(demo: BuiltRunner) -> None:
    free = {f"free {seed}": ResolvedSampling(max_tokens=40, temperature=1.0, seed=seed) for seed in SEEDS}
    bound = {f"bound {seed}": constrained(GrammarKind.JSON_SCHEMA, seed) for seed in SEEDS}
    async with padded(demo) as (engine, events):
        together = await generated(engine, events, {**bound, **free})
    for name, params in {**free, **bound}.items():
        assert together[name] == await alone(demo, params), name


async def test_preempted_requests_continue_in_their_grammar(demo: BuiltRunner) -> None:
    tight = build(DEMO_MODELS / "llama", num_blocks=30, block_size=4)
    wanted = {f"{seed}": constrained(GrammarKind.JSON_SCHEMA, seed) for seed in range(4)}
    async with running(tight) as (engine, events):
        outputs = await generated(engine, events, wanted)
        assert engine.load().preemptions > 0
    for name, params in wanted.items():
        assert outputs[name] == await alone(demo, params)


@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG])
async def test_a_request_continues_in_its_grammar_after_any_token(demo: BuiltRunner, kind: GrammarKind) -> None:
    params = constrained(kind, 3)
    whole = await alone(demo, params)
    assert len(whole) > 10
    async with running(demo) as (engine, events):
        for cut in range(len(whole)):
            engine.submit(request(f"{cut}", PROMPT, params, output=tuple(whole[:cut])))
        await events.finished(*(f"{cut}" for cut in range(len(whole))))
        for cut in range(len(whole)):
            assert [*whole[:cut], *events.ids(f"{cut}")] == whole


async def test_a_reserved_request_continues_after_a_first_token_from_elsewhere(demo: BuiltRunner) -> None:
    params = constrained(GrammarKind.JSON_SCHEMA, 1)
    whole = await alone(demo, params)
    async with running(demo) as (engine, events):
        engine.submit(request("prefill", PROMPT, params, prefill_only=True))
        await events.until(lambda: bool(events.ids("prefill")))
        first = events.tokens["prefill"][0]
        await engine.abort("prefill")
        engine.reserve(request("decode", PROMPT, params))
        engine.prefill_here("decode", (first.token_id,))
        await events.finished("decode")
        assert [first.token_id, *events.ids("decode")] == whole


@pytest.mark.parametrize("given", [{"ignore_eos": True}, {"min_tokens": 60}], ids=["ignore_eos", "min_tokens"])
async def test_a_complete_grammar_ends_the_output_early(demo: BuiltRunner, given: dict[str, Any]) -> None:
    ids = await alone(demo, constrained(GrammarKind.CHOICE, 2, max_tokens=60, **given))
    assert ids[-1] == EOS
    assert len(ids) < 20


@pytest.mark.parametrize("given", [{"ignore_eos": True}, {"min_tokens": 30}], ids=["ignore_eos", "min_tokens"])
async def test_a_grammar_that_may_go_on_does_not_end_early(demo: BuiltRunner, given: dict[str, Any]) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[a-z]+")
    params = ResolvedSampling(max_tokens=30, temperature=1.0, seed=1, grammar=grammar, **given)
    ids = await alone(demo, params)
    assert len(ids) == 30
    assert EOS not in ids[:29]


async def test_stop_tokens_may_be_needed_by_the_grammar(demo: BuiltRunner, tokenizer: Tokenizer) -> None:
    stop = tokenizer.encode("positive", add_special_tokens=False).ids
    grammar = Grammar(GrammarKind.CHOICE, '["positive"]')
    params = ResolvedSampling(
        max_tokens=20, min_tokens=10, temperature=0.0, grammar=grammar, stop_token_ids=tuple(stop)
    )
    ids = await alone(demo, params)
    assert "positive".startswith(tokenizer.decode(ids))


ALONGSIDE: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bias": {"logit_bias": dict.fromkeys(range(0, 4000, 7), 5.0)},
    "filters": {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "logprobs": {"logprobs": 3},
}


async def test_grammars_work_together_with_every_other_parameter(demo: BuiltRunner, tokenizer: Tokenizer) -> None:
    wanted = {name: constrained(GrammarKind.JSON_SCHEMA, 5, **given) for name, given in ALONGSIDE.items()}
    wanted["all"] = constrained(
        GrammarKind.JSON_SCHEMA, 6, **{k: v for each in ALONGSIDE.values() for k, v in each.items()}
    )
    async with padded(demo) as (engine, events):
        together = await generated(engine, events, wanted)
    for name, params in wanted.items():
        assert is_object(tokenizer.decode(together[name][:-1])), name
        assert together[name] == await alone(demo, params), name


async def test_logprobs_are_those_of_the_model_before_the_grammar(demo: BuiltRunner) -> None:
    free = ResolvedSampling(max_tokens=1, temperature=0.0, logprobs=20)
    bound = replace(free, grammar=Grammar(GrammarKind.CHOICE, '["positive"]'))
    async with running(demo) as (engine, events):
        await generated(engine, events, {"free": free, "bound": bound})
    ours, models = events.tokens["bound"][0], events.tokens["free"][0]
    assert ours.top_logprobs == models.top_logprobs
    assert ours.token_id != models.token_id
    assert ours.logprob is not None
    assert ours.logprob < models.top_logprobs[0][1]


async def test_an_output_that_breaks_its_grammar_fails_alone(demo: BuiltRunner) -> None:
    params = constrained(GrammarKind.CHOICE, 1)
    async with running(demo) as (engine, events):
        engine.submit(request("broken", PROMPT, params, output=(EOS - 1, EOS - 2)))
        engine.submit(request("whole", PROMPT, params))
        await events.finished("broken", "whole")
    assert isinstance(events.errors["broken"], InvalidRequest)
    assert events.errors["broken"].field == "grammar"
    assert events.reasons["whole"] is FinishReason.STOP


async def test_an_engine_without_a_tokenizer_refuses_grammars(llama: Sequence[Any]) -> None:
    built = build(llama[0])
    async with running(built) as (engine, _):
        with pytest.raises(InvalidRequest, match=r"tokenizer\.json") as refused:
            engine.submit(request("bound", (5, 6), constrained(GrammarKind.CHOICE, 1)))
        assert refused.value.field == "grammar"


def test_the_tokenizer_is_read_before_the_engine_serves(tmp_path: Path) -> None:
    """Reading one with 128,000 tokens takes the interpreter lock for seconds, in which no step runs."""
    shutil.copytree(DEMO_MODELS / "llama", tmp_path, dirs_exist_ok=True)
    built = build(tmp_path, num_blocks=8, block_size=16)
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    built.grammars.check(Grammar(GrammarKind.CHOICE, '["yes", "no"]'))


async def test_no_matcher_outlives_its_request(demo: BuiltRunner) -> None:
    grammars = demo.runner.grammars
    assert grammars is not None
    endless = ResolvedSampling(
        max_tokens=300, temperature=1.0, seed=1, grammar=Grammar(GrammarKind.REGEX, "[a-z ]{500}")
    )
    free = ResolvedSampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    async with running(demo) as (engine, events):
        for name in ("aborted", "also aborted"):
            engine.submit(request(name, PROMPT, endless))
        await events.until(lambda: len(events.ids("aborted")) > 3)
        assert grammars.num_matchers == 2
        await engine.abort("aborted")
        await engine.abort("also aborted")
        await generated(engine, events, {"free": free})
        assert grammars.num_matchers == 0
