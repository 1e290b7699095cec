"""A pooled request's parts that need no process: batches, attempts, spans, finished vectors and scores."""

import asyncio
from time import monotonic
from typing import Any

import numpy as np
import pytest

from baton.core.errors import (
    LOGITS_FIELD,
    BatonError,
    DataLoss,
    Draining,
    InternalError,
    InvalidRequest,
    NoNode,
    Overloaded,
)
from baton.gateway.request.connections import Connections
from baton.gateway.request.pooling import PoolAttempts, PoolBatch, PoolClient
from baton.gateway.serving.pooling import batch_tokens, cut
from baton.gateway.text.model import ServedModel
from baton.gateway.text.pooled_texts import checked_truncation, span, truncated
from baton.gateway.text.pooled_values import check_dimensions, finished, scores_of
from baton.models.config.pooling import EmbeddingConfig, Pooling, ScoreConfig
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc.status import abort
from tests.unit.gateway.fleets import PREFILL
from tests.unit.gateway.scripted_nodes import ScriptedNode, scripted_nodes
from tests.unit.gateway.test_serving import BOUND_S, model, settings_of

__all__ = ["model"]


def prompts(*lengths: int) -> list[pb.PoolPrompt]:
    return [pb.PoolPrompt(token_ids=range(length)) for length in lengths]


def sizes(*lengths: int, tokens: int) -> list[list[int]]:
    return [[len(prompt.token_ids) for prompt in batch] for batch in cut(prompts(*lengths), tokens=tokens)]


def test_prompts_are_cut_into_batches_by_tokens_in_their_order() -> None:
    assert sizes(4, 4, 4, tokens=8) == [[4, 4], [4]]
    assert sizes(20, 1, 1, 20, tokens=8) == [[20], [1, 1], [20]]
    assert sizes(tokens=8) == []
    assert [len(batch) for batch in sizes(*[1] * 1300, tokens=10_000)] == [512, 512, 276]


def test_a_batch_has_a_few_steps_but_less_where_other_nodes_would_idle() -> None:
    assert batch_tokens(100_000, step_tokens=1000, nodes=2) == 4000
    assert batch_tokens(3000, step_tokens=1000, nodes=2) == 1500
    assert batch_tokens(100, step_tokens=1000, nodes=8) == 1000
    assert batch_tokens(100, step_tokens=1000, nodes=0) == 1000


def test_refusals_and_losses_go_to_another_node_and_the_receipt_says_why() -> None:
    attempts = PoolAttempts(max_attempts=3)
    attempts.failed("a", 1, Overloaded("full"), lost=False)
    attempts.failed("b", 2, NoNode("gone"), lost=True)
    assert attempts.excluded == {1, 2}
    assert attempts.failures == "a refused it (full), then b was lost (gone)"
    assert [retry.reason for retry in attempts.retries] == ["OVERLOADED", "LOST"]


@pytest.mark.parametrize("error", [InternalError("x"), DataLoss("x"), NoNode("x")])
def test_too_many_failed_nodes_end_the_request(error: BatonError) -> None:
    attempts = PoolAttempts(max_attempts=2)
    attempts.failed("a", 1, error, lost=False)
    attempts.failed("b", 2, Draining("leaves"), lost=False)
    with pytest.raises(NoNode, match="2 prefill node"):
        attempts.failed("c", 3, error, lost=False)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_batch_waits_while_the_only_node_restarts(model: ServedModel, refused: bool) -> None:
    """Also one that the node has refused before its status says that it drains."""
    async with scripted_nodes(model.identity) as (prefill, decode):
        settings = settings_of("--prefill", prefill.address, "--decode", decode.address)
        async with Connections(settings, model) as connections:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            status = node_status_pb2.NodeStatus()
            status.CopyFrom(connections.fleet.prefills[prefill.address].status)
            attempts = PoolAttempts(max_attempts=3)
            if refused:
                attempts.failed("prefill", status.info.incarnation, Draining("leaves"), lost=False)
                status.info.incarnation += 1
            else:
                connections.fleet.lost(PREFILL, prefill.address, "gone", monotonic())
            client = PoolClient(connections, max_attempts=3, wait_s=3600.0)
            batch = PoolBatch("r", prompts(4), cache_salt="", priority=0, adapter=None)
            choosing = asyncio.create_task(client._choose(batch, attempts))
            await asyncio.sleep(0)
            assert not choosing.done()
            connections._status_received(PREFILL, prefill.address, status)
            assert (await asyncio.wait_for(choosing, BOUND_S)).address == prefill.address


@pytest.mark.parametrize(("field", "counts"), [(LOGITS_FIELD, False), ("", True)])
async def test_states_that_are_not_finite_do_not_count_against_their_node(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, field: str, counts: bool
) -> None:
    async def fail(node: ScriptedNode, request: object, context: Any) -> None:
        await abort(context, InternalError("failed", field=field))

    monkeypatch.setattr(ScriptedNode, "Pool", fail)
    async with scripted_nodes(model.identity) as (prefill, decode):
        settings = settings_of("--prefill", prefill.address, "--decode", decode.address)
        async with Connections(settings, model) as connections:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            client = PoolClient(connections, max_attempts=3, wait_s=0.0 if counts else BOUND_S)
            for _ in range(3):
                with pytest.raises(NoNode if counts else InternalError, match="failed"):
                    await client.pool(
                        PoolBatch("r", prompts(4), cache_salt="", priority=0, adapter=None), timeout_s=BOUND_S
                    )
            assert bool(connections.fleet.breakers.open(0.0)) is counts


async def test_a_batch_whose_only_node_was_lost_ends_with_what_to_do(model: ServedModel) -> None:
    async with scripted_nodes(model.identity) as (prefill, decode):
        settings = settings_of("--prefill", prefill.address, "--decode", decode.address)
        async with Connections(settings, model) as connections:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            attempts = PoolAttempts(max_attempts=3)
            incarnation = connections.fleet.prefills[prefill.address].incarnation
            attempts.failed("prefill", incarnation, NoNode("gone"), lost=True)
            client = PoolClient(connections, max_attempts=3, wait_s=0.0)
            with pytest.raises(NoNode, match="no other prefill node is ready") as error:
                await client._choose(PoolBatch("r", prompts(4), cache_salt="", priority=0, adapter=None), attempts)
            assert error.value.cure == "see `baton status`, and try again"


def test_an_error_that_every_node_would_repeat_is_raised_at_once() -> None:
    with pytest.raises(InvalidRequest, match="wrong"):
        PoolAttempts(max_attempts=2).failed("a", 1, InvalidRequest("wrong"), lost=False)


def test_a_prompt_is_cut_before_the_tokens_that_end_every_prompt() -> None:
    assert truncated([1, 10, 11, 12, 2], 4, [1, 2]) == [1, 10, 11, 2]
    assert truncated([10, 11, 12], 2, []) == [10, 11]
    assert truncated([1, 10, 2], 3, [1, 2]) == [1, 10, 2]
    assert truncated([1, 10, 2], None, [1, 2]) == [1, 10, 2]
    with pytest.raises(InvalidRequest, match="leaves nothing of the text; allowed: 2 to 4"):
        truncated([10, 11, 12, 2], 1, [2])


@pytest.mark.parametrize("given", [0, -2, 101])
def test_a_wrong_number_of_tokens_to_cut_to_names_the_allowed_ones(given: int) -> None:
    with pytest.raises(InvalidRequest, match="allowed: 1 to 100, -1 for 100"):
        checked_truncation(given, 100)
    assert [checked_truncation(each, 100) for each in (None, 7, -1)] == [None, 7, 100]


def test_every_way_of_pooling_is_a_span() -> None:
    assert span(EmbeddingConfig(Pooling.LAST), 9, 0) == (8, 9)
    assert span(EmbeddingConfig(Pooling.CLS), 9, 4) == (0, 1)
    assert span(EmbeddingConfig(Pooling.MEAN), 9, 0) == (0, 9)
    assert span(EmbeddingConfig(Pooling.MEAN), 9, 4) == (4, 9)
    assert span(EmbeddingConfig(Pooling.MEAN), 3, 4) == (2, 3)


def test_vectors_are_cut_then_normalized_where_the_checkpoint_normalizes() -> None:
    vectors = [np.array([3.0, 4.0, 12.0], np.float32), np.zeros(3, np.float32)]
    assert finished(vectors, EmbeddingConfig(Pooling.LAST), 2).tolist() == [[3.0, 4.0], [0.0, 0.0]]
    normalized = finished(vectors, EmbeddingConfig(Pooling.LAST, normalize=True), 2)
    assert normalized == pytest.approx(np.array([[0.6, 0.8], [0.0, 0.0]]))
    assert normalized.dtype == np.float32


def test_vectors_are_as_long_as_the_checkpoint_allows() -> None:
    free, listed = EmbeddingConfig(Pooling.LAST), EmbeddingConfig(Pooling.LAST, matryoshka_dimensions=(16, 32))
    for dimensions, config in ((None, free), (1, free), (48, free), (16, listed), (48, listed)):
        check_dimensions(dimensions, config, 48)
    for dimensions, config in ((49, free), (17, listed)):
        with pytest.raises(InvalidRequest, match=f"dimensions is {dimensions}"):
            check_dimensions(dimensions, config, 48)


def test_scores_compare_yes_with_no_and_never_overflow() -> None:
    outputs = np.array([[2.0, 1.0], [-2000.0, 0.0], [2000.0, 0.0]])
    assert scores_of(outputs, ScoreConfig()).tolist() == pytest.approx([0.7310585786300049, 0.0, 1.0])
    assert scores_of(outputs[:, :1], ScoreConfig(sigmoid=False)).tolist() == [2.0, -2000.0, 2000.0]
