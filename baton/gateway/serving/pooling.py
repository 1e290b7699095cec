"""Serves one client's request for pooled prompts: embeddings, or scores of pairs. Cuts it into batches by tokens.

All batches run at the same time, as many for each node as keep it busy. The request succeeds whole or not at all.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import BatonError
from baton.core.types import AdapterRef
from baton.gateway.request.pooling import PoolBatch, PoolClient, PooledBatch
from baton.protos.internal.v1 import prefill_pb2 as pb

# A batch of a few steps costs one call for many texts, and is little to compute again when its node is lost.
_STEPS_PER_BATCH = 4
_BATCHES_PER_NODE = 2
_PROMPTS_MAX = 512

Vectors = list[NDArray[np.float32]]


@dataclass(frozen=True)
class PoolingRequest:
    """A client's request.

    Attributes:
        model: name that the client gave; empty: the served model.
        operation: what the client asked for, for metrics.
        size_bytes: approximate size of its texts.
        tokenize: makes the prompts; runs in a thread, and raises InvalidRequest.
        answer_id: id of the answer; empty: it has none.
    """

    request_id: str
    model: str
    operation: str
    size_bytes: int
    tokenize: Callable[[], Sequence[pb.PoolPrompt]]
    cache_salt: str = ""
    priority: int = 0
    answer_id: str = ""


@dataclass(frozen=True)
class PoolReceipt:
    """Report of one batch. The fields that `baton.core.types.Receipt` has too mean the same."""

    request_id: str
    prefill_node: str
    prompts: int
    prompt_tokens: int
    prefill_cached_tokens: int
    queue_s: float
    prefill_s: float
    total_s: float
    attempts: int
    why: str
    revision: str
    revision_name: str
    prefill_version: str

    def json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class PooledAnswer:
    """The results of a request: one vector for each prompt, in order."""

    vectors: Vectors
    prompt_tokens: int
    cached_tokens: int
    receipts: Sequence[PoolReceipt]


def cut(prompts: Sequence[pb.PoolPrompt], *, tokens: int) -> Iterator[Sequence[pb.PoolPrompt]]:
    """Cuts the prompts into batches of at most so many tokens, or of one longer prompt. Keeps their order."""
    start = held = 0
    for index, prompt in enumerate(prompts):
        size = len(prompt.token_ids)
        if index > start and (held + size > tokens or index - start >= _PROMPTS_MAX):
            yield prompts[start:index]
            start, held = index, 0
        held += size
    if start < len(prompts):
        yield prompts[start:]


def batch_tokens(total: int, *, step_tokens: int, nodes: int) -> int:
    """Tokens of a batch: a few steps, but less where other nodes would idle; at least one step."""
    share = math.ceil(total / max(1, nodes))
    return max(step_tokens, min(_STEPS_PER_BATCH * step_tokens, share))


async def pool(
    client: PoolClient,
    request: PoolingRequest,
    prompts: Sequence[pb.PoolPrompt],
    *,
    adapter: AdapterRef | None,
    deadline_s: float,
) -> tuple[PooledAnswer, Sequence[PooledBatch]]:
    """Computes the prompts on the prefill nodes. The first error ends all batches.

    Raises:
        BatonError: a batch could not be computed.
    """
    total = sum(len(prompt.token_ids) for prompt in prompts)
    size = batch_tokens(total, step_tokens=client.step_tokens, nodes=client.num_nodes)
    batches = [
        PoolBatch(request.request_id, batch, request.cache_salt, request.priority, adapter)
        for batch in cut(prompts, tokens=size)
    ]
    turns = asyncio.Semaphore(_BATCHES_PER_NODE * max(1, client.num_nodes))

    async def run(batch: PoolBatch) -> PooledBatch:
        async with turns:
            return await client.pool(batch, timeout_s=deadline_s - monotonic())

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(batch)) for batch in batches]
    except* BatonError as errors:
        first = errors.exceptions[0]
    else:
        done = [task.result() for task in tasks]
        return _answer(request, batches, done), done
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, BatonError)
    raise first


def _answer(request: PoolingRequest, batches: Sequence[PoolBatch], done: Sequence[PooledBatch]) -> PooledAnswer:
    vectors: Vectors = []
    receipts: list[PoolReceipt] = []
    for batch, pooled in zip(batches, done, strict=True):
        results = pooled.response.pooled
        vectors += [np.frombuffer(result.values, "<f4").astype(np.float32, copy=False) for result in results]
        receipts.append(
            PoolReceipt(
                request_id=request.request_id,
                prefill_node=pooled.node,
                prompts=len(batch.prompts),
                prompt_tokens=pooled.prompt_tokens,
                prefill_cached_tokens=pooled.cached_tokens,
                queue_s=pooled.response.queue_s,
                prefill_s=pooled.response.pool_s,
                total_s=pooled.total_s,
                attempts=pooled.attempts,
                why=pooled.failures,
                revision=pooled.revision,
                revision_name=pooled.revision_name,
                prefill_version=pooled.version,
            )
        )
    return PooledAnswer(
        vectors,
        prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
        cached_tokens=sum(receipt.prefill_cached_tokens for receipt in receipts),
        receipts=receipts,
    )
