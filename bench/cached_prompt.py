"""CPU time of a prompt that is cached but for its last block, from the client's message to the first token, by stage.

The real functions of client, gateway and node run one after the other on one thread, and a device that costs nothing
draws the token. gRPC, sockets, CUDA's launches and the device's work are not part of it.
"""

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from baton.core.types import LocalPolicy
from baton.engine.device.launched_step import PlainTokens
from baton.engine.request import EngineLimits, EngineRequest, ModelFacts
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step_meter import StepMeter
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.gateway.core.request import Request
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.placement import Placement, Route
from baton.gateway.fleet.prefix_index import PrefixIndex
from baton.gateway.request.node_messages import Due, NodeMessages
from baton.gateway.serving.preparation import RequestCall, prepare
from baton.gateway.text.model import ServedModel, read_served_model
from baton.gateway.text.text_work import TextWork
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.settings.config import DEMO_MODELS
from bench import table
from bench.table import Row
from decode_node.submitted import engine_request

GOAL_US = 0.25  # for each token, all stages together
_LENGTHS = (8192, 32768, 131072)
_BLOCK_SIZE, _CONTEXT, _IDENTITY, _NODE = 16, 1 << 18, "bench", "decode-0"
_ROUNDS = 15
FIRST_TIME = "gateway, index, first time"
T = TypeVar("T")

_TEXT = """
`python -m bench cached_prompt`: CPU time of one thread for each token of a prompt whose blocks are all cached but the
last, the median of {rounds} rounds. The client sends token ids.

- client: the list of ids as a message, and its bytes;
- gateway, request: the message is read, checked and made a request;
- gateway, index: the prompt's blocks are named and looked up in the index of all nodes; "first time" is a prompt that
  this gateway has not seen lately;
- gateway, message: the message to the node, and its bytes;
- node, request: the message is read and made a request of the engine;
- node, stores: what the stores outside of the cache could add; only with `--host-cache-gib`;
- node, blocks: the request is checked, its cached blocks are found and held, and it gets the others;
- node, step: the step that computes the last block, and its end with the first token.

The sum counts the index for a prompt that the gateway has seen. gRPC's threads and the device are not part of it. At
8,192 tokens a third of it is the step, whose fixed part counts more there.

Before token ids were arrays and cached blocks were found by their tokens, the sums were 0.77, 0.60 and 1.63 us in a run
on the same machine (2026-11-29). Real processes there (a gateway, a decode node with one small layer on the CPU, a gRPC
client) took 38.0 ms to the first token of 32,752 cached and 16 new tokens before and 19.1 ms after; 64 tokens took 7 to
9 ms. These are the least of 12 requests each, on 2 cores that other work shared.
"""

STAGES = (
    "client",
    "gateway, request",
    FIRST_TIME,
    "gateway, index",
    "gateway, message",
    "node, request",
    "node, stores",
    "node, blocks",
    "node, step",
)


class CachedPrompt:
    """One prompt that a node has cached and a gateway's index knows; `send` sends it once more. Make it on an event
    loop.

    Attributes:
        cpu_s: CPU time of each stage of the last call.
        cached_tokens: tokens that the last call found in the node's cache.
    """

    def __init__(self, model: ServedModel, length: int) -> None:
        self._model, self._texts = model, TextWork()
        self._ids = np.random.default_rng(0).integers(1, 4000, length, dtype=np.int32).tolist()
        facts = ModelFacts(2 * length // _BLOCK_SIZE + 64, _BLOCK_SIZE, 4096, _CONTEXT, (0,), _IDENTITY)
        self._scheduler = Scheduler(EngineLimits(8192, 8, 8, prefix_cache=True), facts, StepMeter(), offloads=True)
        self._numbers = PromptBlocks(self._ids, cache_salt="").numbers(_IDENTITY, _BLOCK_SIZE)
        self._index = self._new_index()
        view = NodeView(
            _NODE, 1, "", open=True, max_context_tokens=_CONTEXT, block_size=_BLOCK_SIZE, room_tokens=_CONTEXT,
            requests=0, tokens_waiting=0, ready_peers=frozenset(),
        )  # fmt: skip
        self._placement = Placement(Route.LOCAL, view, None, 0, "bench", None)
        self._keys = itertools.count(1)
        self.cpu_s: dict[str, float] = {}
        self.cached_tokens = 0

    def _new_index(self) -> PrefixIndex:
        """A gateway's index that has the prompt's blocks, and has seen no prompt yet."""
        index = PrefixIndex()
        index.store(_NODE, self._numbers.up_to(len(self._numbers)))
        return index

    async def send(self) -> None:
        """Takes the prompt through all stages."""
        wire = self._timed("client", self._client)
        began_s = time.thread_time()
        request = await self._prepared(wire)
        self.cpu_s["gateway, request"] = time.thread_time() - began_s
        for stage, index in ((FIRST_TIME, self._new_index()), ("gateway, index", self._index)):
            self._timed(stage, partial(self._look_up, index, request))
        wire = self._timed("gateway, message", partial(self._node_message, request))
        given = self._timed("node, request", partial(self._node_request, wire))
        self._timed("node, stores", partial(self._scheduler.wanted, given))
        self._timed("node, blocks", partial(self._hold, given))
        self._timed("node, step", self._step)
        self._save()

    def _timed(self, stage: str, work: Callable[[], T]) -> T:
        began_s = time.thread_time()
        done = work()
        self.cpu_s[stage] = time.thread_time() - began_s
        return done

    def _client(self) -> bytes:
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=self._ids), sampling=sampling).SerializeToString()

    async def _prepared(self, wire: bytes) -> Request:
        message = pb.GenerateRequest.FromString(wire)
        call = RequestCall(message, None, "bench", started_at_s=0.0, timeout_s=1e9)
        return (await prepare(call, self._model, self._texts, max_context_tokens=_CONTEXT)).request

    def _look_up(self, index: PrefixIndex, request: Request) -> None:
        numbers = PromptBlocks(request.prompt, cache_salt="").numbers(_IDENTITY, _BLOCK_SIZE)
        for _ in index.look_ahead(numbers):
            pass
        found = index.cached_blocks(numbers, [_NODE])
        index.blocks_inside(numbers, found)
        index.blocks_below(numbers, found)
        assert found == {_NODE: len(numbers)}, "the index has the whole prompt"

    def _node_message(self, request: Request) -> bytes:
        messages = NodeMessages(request, LocalPolicy.LOCAL)
        submit = messages.submit([], self._placement, due=Due(None, None), budget_s=1e9, max_queue_s=1.0)
        submit.key = next(self._keys)
        return decode_pb2.SessionRequest(submit=submit).SerializeToString()

    def _node_request(self, wire: bytes) -> EngineRequest:
        submit = decode_pb2.SessionRequest.FromString(wire).submit
        return engine_request(str(submit.key), submit, 0.0)

    def _hold(self, request: EngineRequest) -> None:
        self.cached_tokens = self._scheduler.reservations.reserve(request, 0.0).cached_tokens
        self._scheduler.reservations.prefill_here(request.request_id, request.output, 0.0)

    def _step(self) -> None:
        """Runs steps until the request has ended; only the first call needs more than one."""
        while (batch := self._scheduler.schedule(0.0)) is not None:
            rows = batch.shared_rows
            indices = np.array([-1 if row.sample is None else row.sample.output_index for row in rows], np.int64)
            unsampled = frozenset(number for number, row in enumerate(rows) if row.sample is None)
            tokens = PlainTokens(indices, unsampled).outputs(np.full(len(rows), 5, dtype=np.int32))
            self._scheduler.complete(tokens, 0.01)

    def _save(self) -> None:
        """Saves what has been offered, as a node does between two turns of a conversation."""
        assert self._scheduler.offload is not None
        for entries in self._scheduler.offload.saves.take_finished():
            self._scheduler.offload.saves.saved(entries, len(entries))


async def measure(model: ServedModel, length: int, rounds: int = _ROUNDS) -> dict[str, float]:
    """CPU time of each stage in microseconds for each token."""
    prompt, found = CachedPrompt(model, length), []
    await prompt.send()  # nothing is cached yet
    for _ in range(rounds):
        await prompt.send()
        found.append(prompt.cpu_s)
    assert prompt.cached_tokens == length - _BLOCK_SIZE, "all but the last block is cached"
    return {stage: median(each[stage] for each in found) / length * 1e6 for stage in STAGES}


def run(progress: Callable[[str], None]) -> list[Row]:
    gc.collect()
    gc.freeze()
    rows: list[Row] = []
    with closing(read_served_model(DEMO_MODELS / "llama", None)) as model:
        for length in _LENGTHS:
            progress(f"a cached prompt of {length} tokens")
            found, work = asyncio.run(measure(model, length)), f"{length} tokens"
            total = sum(us for stage, us in found.items() if stage != FIRST_TIME)
            rows.append(Row("all stages", work, total, "us for each token", limit=GOAL_US))
            rows += [Row(stage, work, us, "us for each token") for stage, us in found.items()]
    return rows


def write_markdown(title: str, rows: Sequence[Row], path: Path) -> None:
    """Writes the page: the rows, and what they are."""
    table.write_markdown(title, rows, path)
    path.write_text(path.read_text() + _TEXT.format(rounds=_ROUNDS))
