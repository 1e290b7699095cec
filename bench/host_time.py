"""CPU time of a decode node's host for a step and for a hand-over.

The real scheduler, machine, input rows and messages run on one thread, and a device that costs nothing draws the
tokens. CUDA launches, gRPC and the transfer are not part of it.
"""

import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from baton.engine.batch import Batch
from baton.engine.device.decode_buffers import new_decode_buffers
from baton.engine.device.launched_step import PlainTokens
from baton.engine.device.step_slot import StepSlots
from baton.engine.request import EngineLimits, ModelFacts
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step_meter import StepMeter
from baton.metrics.metric import ProcessRole
from baton.node.meter import NodeMeter
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from bench import table
from bench.table import Row
from decode_node.commands import Abort, Admit, CloseLease, Command, OpenLease, Reserve, Send
from decode_node.events import (
    Aborted,
    Admitted,
    Event,
    HandOverReceived,
    LeaseClosed,
    LeaseFilled,
    LeaseOpened,
    Reserved,
    SessionMessage,
    SessionOpened,
    StepDone,
)
from decode_node.machine import DecodeMachine
from decode_node.rules import DecodeRules
from kvtransfer.leases import LeaseTotals

GOAL_MS = 1.0  # of a step
_BLOCK_SIZE, _CONTEXT, _VOCAB = 16, 8192, 128256
_PROMPT, _OUTPUT = 250, 200  # of chat, in the mean
_ROWS = (32, 128, 256)
_STEPS, _ROUNDS = 64, 100
_STEP_S = 0.0056
_SESSION, _PEER = 1, 1
_PARTS = ("schedule", "inputs", "results", "complete", "messages")
_HAND_OVER = "hand-over"

_TEXT = """
`python -m bench host_time`: CPU time of one thread, the least of {rounds} rounds of {steps} steps, with a device that
costs nothing. Requests of {prompt} tokens in and {output} out end, and others take their places, so that the batch
stays full. A step is the sum of its parts:

- schedule: the choice of its rows;
- inputs: the rows in the bytes that are copied to the device;
- results: tokens as objects;
- complete: what they mean for their requests;
- messages: the counters, and the serialized message to one gateway, with the ends of requests.

A hand-over is everything from a request's submission to its place in the batch, except the transfer. What CUDA's
launches, gRPC and a node's other threads take is not part of it.
"""


class DecodeHost:
    """A decode node without device, transfer and sockets: `step` runs one step, `hand_over` admits one request.

    Attributes:
        cpu_s: CPU time of each part so far.
        live: requests that have not ended.
        bytes_sent: bytes of the messages to gateways so far.
    """

    def __init__(self, rows: int) -> None:
        blocks = -(-(_PROMPT + _OUTPUT + 1) // _BLOCK_SIZE) + 1
        facts = ModelFacts(2 * rows * blocks, _BLOCK_SIZE, _VOCAB, _CONTEXT, (0,), "bench")
        limits = EngineLimits(8192, rows, 64, prefix_cache=True)
        self._scheduler = Scheduler(limits, facts, StepMeter())
        rules = DecodeRules("decode-0", "127.0.0.1:1", 7, 30.0, lambda *_: "", 64, _BLOCK_SIZE, b"bench")
        self._machine = DecodeMachine(rules, itertools.count(1))
        self._counts = NodeMeter(ProcessRole.DECODE)
        device = torch.device("cpu")
        self._buffers = new_decode_buffers(
            max_rows=rows, max_context_tokens=_CONTEXT, block_size=_BLOCK_SIZE, device=device
        )
        self._slots = StepSlots(device, input_bytes=len(self._buffers.host.memory), max_rows=self._buffers.max_rows)
        self._in_flight: deque[tuple[Batch, PlainTokens]] = deque()
        self._rng = np.random.default_rng(0)
        self._tokens = self._rng.integers(1, _VOCAB, self._buffers.max_rows, dtype=np.int32)
        self._keys = itertools.count(1)
        self._now_s = 0.0
        self.live = self.bytes_sent = 0
        self.cpu_s = dict.fromkeys((*_PARTS, _HAND_OVER), 0.0)
        self._on(SessionOpened(_SESSION))

    def hand_over(self, output_tokens: int = _OUTPUT) -> None:
        """Takes one request from its submission to the decode batch, after a prompt that another node computed."""
        key = next(self._keys)
        submit = pb.SubmitRequest(
            key=key,
            request_id=f"request-{key}",
            prompt_token_ids=self._rng.integers(1, _VOCAB, _PROMPT).tolist(),
            sampling=common_pb2.SamplingParams(temperature=1.0, seed=key, max_tokens=output_tokens, ignore_eos=True),
            policy=pb.LOCAL_POLICY_STRICT,
            placement=pb.PLACEMENT_REMOTE,
            prefill_available=True,
        )
        self.live += 1
        began_s = time.thread_time()
        self._on(SessionMessage(_SESSION, pb.SessionRequest(submit=submit)))
        task = self._machine.task(_SESSION, key)
        assert task is not None, "the request is here"
        assert task.lease is not None, "there is room for it"
        lease = task.lease
        first = common_pb2.Token(token_id=1, index=0)
        self._on(HandOverReceived(_PEER, pb.HandOver(lease=lease, first_token=first)))
        self._on(LeaseFilled(LeaseTotals(lease, 0, 0, 0.0)))
        self.cpu_s[_HAND_OVER] += time.thread_time() - began_s

    def step(self) -> None:
        """Launches a step, then ends the one before it."""
        self._now_s += _STEP_S
        times_s = [time.thread_time()]
        batch = self._scheduler.schedule(self._now_s)
        times_s.append(time.thread_time())
        assert batch is not None, "requests decode"
        self._launch(batch)
        times_s.append(time.thread_time())
        if self._scheduler.steps_in_flight == 1:
            return
        _, plain = self._in_flight.popleft()
        results = plain.outputs(self._tokens)
        times_s.append(time.thread_time())
        events = self._scheduler.complete(results, _STEP_S)
        times_s.append(time.thread_time())
        self._counts.step(events)
        self._on(StepDone(events))
        times_s.append(time.thread_time())
        for part, (before_s, after_s) in zip(_PARTS, itertools.pairwise(times_s), strict=True):
            self.cpu_s[part] += after_s - before_s

    def _launch(self, batch: Batch) -> None:
        slot, rows, host = self._slots.take(), batch.shared_rows, self._buffers.host
        self._buffers.fill(rows, step=batch.step, slot=slot)
        host.copied()
        indices = host.sampling.arrays.output_index_R[: len(rows)].copy()
        self._in_flight.append((batch, PlainTokens(indices, frozenset(host.sampling.unsampled))))
        self._slots.give_back(slot)

    def _on(self, event: Event) -> None:
        """Delivers an event to the machine, and answers its commands as the driver would."""
        events = deque([event])
        while events:
            for command in self._machine.handle(events.popleft(), self._now_s):
                if (answer := self._execute(command)) is not None:
                    events.append(answer)

    def _execute(self, command: Command) -> Event | None:
        match command:
            case Send(message=message):
                self.bytes_sent += len(message.SerializeToString())
                self.live -= message.HasField("released")
            case Reserve(request=request, arriving_tokens=arriving):
                reservation = self._scheduler.reservations.reserve(request, self._now_s, arriving_tokens=arriving)
                return Reserved(request.request_id, reservation)
            case OpenLease(grant=grant):
                return LeaseOpened(grant.number)
            case CloseLease(lease=number):
                return LeaseClosed(LeaseTotals(number, 0, 0, 0.0))
            case Admit(engine_id=engine_id, first=first):
                return Admitted(engine_id, self._scheduler.reservations.admit(engine_id, first))
            case Abort(engine_id=engine_id):
                self._scheduler.abort(engine_id)
                return Aborted(engine_id)
        return None


@dataclass(frozen=True)
class HostTimes:
    """CPU times in microseconds: of each part of a step, and of a hand-over."""

    parts_us: dict[str, float]
    hand_over_us: float
    bytes_per_token: float

    @property
    def step_us(self) -> float:
        return sum(self.parts_us.values())


def measure(rows: int) -> HostTimes:
    """Measures steps of a full batch, in which requests end and others take their places."""
    node = DecodeHost(rows)
    for index in range(rows):  # their ends are spread evenly
        node.hand_over(2 + _OUTPUT * (index + 1) // rows)
    found: list[HostTimes] = []
    for _ in range(_ROUNDS + 1):
        node.cpu_s, node.bytes_sent, num_begun = dict.fromkeys(node.cpu_s, 0.0), 0, 0
        for _ in range(_STEPS):
            while node.live < rows:
                node.hand_over()
                num_begun += 1
            node.step()
        parts_us = {part: node.cpu_s[part] / _STEPS * 1e6 for part in _PARTS}
        hand_over_us = node.cpu_s[_HAND_OVER] / max(1, num_begun) * 1e6
        found.append(HostTimes(parts_us, hand_over_us, node.bytes_sent / (_STEPS * rows)))
    return min(found[1:], key=lambda times: times.step_us)  # in the first round memory grows


def run(progress: Callable[[str], None]) -> list[Row]:
    gc.collect()
    gc.freeze()
    rows: list[Row] = []
    for num_rows in _ROWS:
        progress(f"steps of {num_rows} rows")
        times, work = measure(num_rows), f"{num_rows} rows"
        rows.append(Row("step", work, times.step_us / 1e3, "ms", limit=GOAL_MS))
        rows.append(Row("step: for each row", work, times.step_us / num_rows, "us"))
        rows += [Row(f"step: {part}", work, us, "us") for part, us in times.parts_us.items()]
        rows.append(Row(_HAND_OVER, f"to a batch of {num_rows} rows", times.hand_over_us, "us"))
        rows.append(Row("message", f"for each of {num_rows} tokens", times.bytes_per_token, "bytes"))
    return rows


def write_markdown(title: str, rows: Sequence[Row], path: Path) -> None:
    """Writes the page: the rows, and what they are."""
    table.write_markdown(title, rows, path)
    text = _TEXT.format(rounds=_ROUNDS, steps=_STEPS, prompt=_PROMPT, output=_OUTPUT)
    path.write_text(path.read_text() + text)
