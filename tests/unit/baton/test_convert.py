"""Every value survives its conversion to a message and back."""

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.costs import StepCosts
from baton.core.errors import InvalidRequest
from baton.core.types import FinishReason, Path, Receipt, SamplingParams, TokenOutput, Usage
from baton.protos.v1 import common_pb2 as pb
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
def test_sampling_params(params: SamplingParams) -> None:
    assert convert.sampling_from_proto(convert.sampling_to_proto(params)) == params


def test_absent_sampling_fields_take_the_defaults() -> None:
    assert convert.sampling_from_proto(pb.SamplingParams()) == SamplingParams()


def test_zero_is_not_absent() -> None:
    params = convert.sampling_from_proto(pb.SamplingParams(temperature=0.0, seed=0, logprobs=0))
    assert (params.temperature, params.seed, params.logprobs) == (0.0, 0, 0)


def test_message_and_dataclass_have_the_same_sampling_fields() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def test_a_wrong_value_is_found_by_converting_it() -> None:
    with pytest.raises(InvalidRequest, match="top_p is 7"):
        convert.sampling_from_proto(pb.SamplingParams(top_p=7.0))


def test_a_number_too_large_for_the_wire_is_the_callers_error() -> None:
    with pytest.raises(InvalidRequest, match="cannot be sent"):
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
def test_token(token: TokenOutput) -> None:
    assert convert.token_from_proto(convert.token_to_proto(token)) == token


@given(st.none() | st.sampled_from(FinishReason))
def test_finish_reason(reason: FinishReason | None) -> None:
    assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) == reason


@given(st.builds(Usage, numbers, numbers, numbers))
def test_usage(usage: Usage) -> None:
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
        first_token_s=seconds,
        total_s=seconds,
        attempts=numbers,
        prefill_cached_tokens=numbers,
        segment_bytes=st.integers(0, 2**64 - 1),
        layer_groups=numbers,
    )
)
def test_receipt(receipt: Receipt) -> None:
    assert convert.receipt_from_proto(convert.receipt_to_proto(receipt)) == receipt


@pytest.mark.parametrize(
    "points", [[(0, 1.0)], [(1, 0.0)], [(1, math.nan)], [(1, 1.0), (1, 2.0)], [(1, 2.0), (2, 1.0)], [(1, math.inf)], []]
)
def test_impossible_step_costs_count_as_unknown(points: list[tuple[int, float]]) -> None:
    message = pb.StepCosts(points=[pb.TokensCost(tokens=tokens, seconds=seconds) for tokens, seconds in points])
    assert convert_node.costs_from_proto(message) is None


def test_step_costs_arrive_as_they_were_sent() -> None:
    costs = StepCosts(((1, 0.5), (8, 0.5), (64, 1.0)), key_s=1e-8, pair_s=1e-9, decode_row_s=1e-6)
    assert convert_node.costs_from_proto(convert_node.costs_to_proto(costs)) == costs
    assert convert_node.costs_from_proto(convert_node.costs_to_proto(StepCosts(((1, 0.5),), key_s=math.nan))) is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (pb.CacheSpec(kind=pb.KV_KIND_GQA, num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16"), (256, 0)),
        (
            pb.CacheSpec(
                kind=pb.KV_KIND_MLA,
                num_layers=4,
                num_kv_heads=1,
                head_dim=8,
                dtype="float8_e4m3fn",
                index=pb.CacheSpec(kind=pb.KV_KIND_MLA, num_layers=4, num_kv_heads=1, head_dim=3, dtype="bfloat16"),
                state=pb.CacheSpec(kind=pb.KV_KIND_STATE, num_layers=2, num_kv_heads=5, head_dim=7, dtype="float32"),
            ),
            (32 + 24, 280),
        ),
    ],
)
def test_what_a_node_keeps_counts_every_part(spec: pb.CacheSpec, expected: tuple[int, int]) -> None:
    assert convert_node.kept_bytes(spec) == expected
