"""Every value survives its conversion to a message and back."""

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.costs import StepCosts
from baton.core.errors import InvalidRequest
from baton.core.sampling import SAMPLING_FIELDS, ResolvedSampling, SamplingParams
from baton.core.types import FinishReason, Grammar, GrammarKind, LoadedTokens, Path, Receipt, TokenOutput, Usage
from baton.protos.v1 import common_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc import convert, convert_node

numbers = st.integers(0, 2**32 - 1)
seconds = st.floats(0, 1e6)

samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 2**32 - 1),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    top_k=numbers,
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(numbers, st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(numbers, max_size=3).map(tuple),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    include_stop=st.booleans(),
    prompt_logprobs=st.none() | st.integers(0, 20),
)


@given(samplings)
def test_sampling_params_are_unchanged(params: SamplingParams) -> None:
    assert convert.resolved_sampling_from_proto(convert.sampling_to_proto(params)) == params.resolved()


def test_absent_sampling_fields_stay_unset() -> None:
    assert convert.sampling_from_proto(pb.SamplingParams()) == SamplingParams()


def test_nodes_read_absent_sampling_fields_as_the_neutral_defaults() -> None:
    assert convert.resolved_sampling_from_proto(pb.SamplingParams()) == ResolvedSampling()


def test_zero_is_not_absent() -> None:
    params = convert.sampling_from_proto(pb.SamplingParams(temperature=0.0, seed=0, logprobs=0))
    assert (params.temperature, params.seed, params.logprobs) == (0.0, 0, 0)


def test_message_and_dataclass_have_the_same_sampling_fields() -> None:
    assert (
        {field.name for field in fields(SamplingParams)}
        == {*SAMPLING_FIELDS}
        == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    )


def test_a_wrong_value_is_found_by_converting_it() -> None:
    with pytest.raises(InvalidRequest, match="top_p is 7"):
        convert.sampling_from_proto(pb.SamplingParams(top_p=7.0))


def test_a_number_too_large_for_the_wire_is_the_callers_error() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is 1099511627776"):
        convert.sampling_to_proto(SamplingParams(max_tokens=2**40))


@given(
    st.builds(
        TokenOutput,
        token_id=numbers,
        index=numbers,
        logprob=st.none() | st.floats(-1000, 0),
        top_logprobs=st.lists(st.tuples(numbers, st.floats(-1000, 0)), max_size=3).map(tuple),
    )
)
def test_a_token_is_unchanged(token: TokenOutput) -> None:
    assert convert.token_from_proto(convert.token_to_proto(token)) == token


@given(st.none() | st.sampled_from(FinishReason))
def test_a_finish_reason_is_unchanged(reason: FinishReason | None) -> None:
    assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) == reason


@given(st.builds(Usage, numbers, numbers, numbers))
def test_usage_is_unchanged(usage: Usage) -> None:
    assert convert.usage_from_proto(convert.usage_to_proto(usage)) == usage


@given(
    st.builds(
        Receipt,
        path=st.sampled_from(Path),
        prompt_tokens_sent=numbers,
        bytes_sent=st.integers(0, 2**64 - 1),
        segments=numbers,
        queue_s=seconds,
        prefill_s=seconds,
        transfer_s=seconds,
        ttft_s=seconds,
        total_s=seconds,
        attempts=numbers,
        prefill_cached_tokens=numbers,
        segment_bytes=st.integers(0, 2**64 - 1),
        layer_groups=numbers,
        prefill_loaded=st.builds(LoadedTokens, numbers, numbers, numbers, numbers),
        decode_loaded=st.builds(LoadedTokens, numbers, numbers, numbers, numbers),
    )
)
def test_a_receipt_is_unchanged(receipt: Receipt) -> None:
    assert convert.receipt_from_proto(convert.receipt_to_proto(receipt)) == receipt


@pytest.mark.parametrize(
    "points", [[(0, 1.0)], [(1, 0.0)], [(1, math.nan)], [(1, 1.0), (1, 2.0)], [(1, 2.0), (2, 1.0)], [(1, math.inf)], []]
)
def test_impossible_step_costs_count_as_unknown(points: list[tuple[int, float]]) -> None:
    message = node_status_pb2.StepCosts(
        points=[node_status_pb2.TokensCost(tokens=tokens, seconds=seconds) for tokens, seconds in points]
    )
    assert convert_node.costs_from_proto(message) is None


def test_step_costs_arrive_as_they_were_sent() -> None:
    costs = StepCosts(((1, 0.5), (8, 0.5), (64, 1.0)), key_s=1e-8, pair_s=1e-9, decode_row_s=1e-6)
    assert convert_node.costs_from_proto(convert_node.costs_to_proto(costs)) == costs
    assert convert_node.costs_from_proto(convert_node.costs_to_proto(StepCosts(((1, 0.5),), key_s=math.nan))) is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            node_status_pb2.CacheSpec(
                kind=node_status_pb2.KV_KIND_GQA, num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16"
            ),
            (256, 0),
        ),
        (
            node_status_pb2.CacheSpec(
                kind=node_status_pb2.KV_KIND_MLA,
                num_layers=4,
                num_kv_heads=1,
                head_dim=8,
                dtype="float8_e4m3fn",
                index=node_status_pb2.CacheSpec(
                    kind=node_status_pb2.KV_KIND_MLA, num_layers=4, num_kv_heads=1, head_dim=3, dtype="bfloat16"
                ),
                state=node_status_pb2.CacheSpec(
                    kind=node_status_pb2.KV_KIND_STATE, num_layers=2, num_kv_heads=5, head_dim=7, dtype="float32"
                ),
            ),
            (32 + 24, 280),
        ),
    ],
)
def test_what_a_node_keeps_counts_every_part(spec: node_status_pb2.CacheSpec, expected: tuple[int, int]) -> None:
    assert convert_node.kept_bytes(spec) == expected


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (Grammar(GrammarKind.JSON_OBJECT), "json_object"),
        (Grammar(GrammarKind.CHOICE, '["a", "ö"]'), "choice"),
        *((Grammar(kind, "text"), kind.value) for kind in GrammarKind if kind not in ("json_object", "choice")),
    ],
)
def test_a_constraint_is_one_field_of_the_message(grammar: Grammar, field: str) -> None:
    message = convert.grammar_to_proto(grammar)
    assert message.WhichOneof("constraint") == field
    assert convert.grammar_from_proto(message) == grammar


@pytest.mark.parametrize("text", ["", "{}", '"ab"', "[1]", '["\\ud800"]', "[" * 100_000])
def test_a_choice_that_is_no_array_of_texts_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="array of texts"):
        convert.grammar_to_proto(Grammar(GrammarKind.CHOICE, text))


def test_a_constraint_of_an_older_client_is_refused_with_the_cure() -> None:
    older = pb.Grammar.FromString(b"\x08\x03\x12\x02a+")  # kind = REGEX, text = "a+"
    with pytest.raises(InvalidRequest, match=r"CHANGELOG\.md"):
        convert.grammar_from_proto(older)
