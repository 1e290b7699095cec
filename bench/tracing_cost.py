"""The gateway's CPU time for tracing, per request that is exported and per one that is not: `python -m
bench.tracing_cost`.

CPU time of this thread, the least of many rounds, so that other work on the machine does not count.
"""

import time
from collections.abc import Callable
from pathlib import Path

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from baton.core.sampling import ResolvedSampling
from baton.core.types import LocalPolicy
from baton.gateway.core.events import DecodeReplied, Event, PrefillEnded, PrefillReplied, Started, TokensCame
from baton.gateway.core.request import Request, Rules
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.observe.tracing.otlp import SpanEncoder
from baton.gateway.observe.tracing.tracer import Ending, Tracer
from baton.gateway.request.commands import Command
from baton.gateway.request.journal import Journal
from baton.gateway.request.machine import RequestMachine
from baton.metrics.metric import Outcome
from baton.protos.internal.v1 import decode_pb2, lease_pb2, prefill_pb2
from baton.protos.v1 import common_pb2, node_status_pb2
from baton.tracing.sampling import Sampling
from bench.machine import machine_and_date

PAGE = Path(__file__).resolve().parent / "results" / "tracing_cost.md"

_ROUNDS, _CALLS = 200, 20
_CHUNKS, _CHUNK_TOKENS, _TOKENS = 4, 512, 128
_PROMPT = list(range(_CHUNKS * _CHUNK_TOKENS))
_RATIO = 0.1

_TEXT = """# What traces cost ({host})

`python -m bench.tracing_cost`, CPU time of one thread of the gateway, the least of {rounds} rounds of {calls} calls.
The request has a prompt of {prompt} tokens in {chunks} chunks on a prefill node, and {tokens} tokens of output from a
decode node, each in a message of its own; nothing is retried.

| what | cost |
|---|---|
| request without tracing: its machine's decisions and answers, {messages} messages | {machine:.0f} us |
| journal, of every request: `/ui` reads it too | {journal:.1f} us |
| journal and its end without an export | {unsampled:.1f} us, {unsampled_share:.2f} % of the machine's time |
| journal, {spans} spans built and encoded to {size} bytes | {sampled:.0f} us, {sampled_share:.1f} % |
| mean with 10 % sampled | {mean:.1f} us, {mean_share:.2f} % |
| per token of output | nil: tokens pass no journal |

The machine's time leaves out the tokenizer, the HTTP or gRPC door and the streams to nodes, so that the shares here are
of the smallest part of what a request costs the gateway. Code that runs 20 times in a row is also faster than the same
code once per request: [tracing.md](tracing.md) has what a real gateway spends.
"""


Step = tuple[Event, list[Command]]  # what the machine gets, and what it answers


class _Words:
    """A detokenizer that costs nothing."""

    held = ""

    def push(self, *token_ids: int) -> str:
        return " word" * len(token_ids)

    def finish(self) -> str:
        return ""


def main() -> None:
    exported: list[bytes] = []
    fleet, events = _fleet(), _events()
    machine, steps = _serve(fleet, events)
    none, all_of_them = _tracer(0.0, exported), _tracer(1.0, exported)
    machine_us = _cost_us(lambda: _serve(fleet, events))
    journal_us = _cost_us(lambda: _journal(steps))
    unsampled_us = _cost_us(lambda: _trace(none, steps, machine))
    assert not exported
    sampled_us = _cost_us(lambda: _trace(all_of_them, steps, machine))
    mean_us = (1 - _RATIO) * unsampled_us + _RATIO * sampled_us
    text = _TEXT.format(
        host=machine_and_date(),
        rounds=_ROUNDS,
        calls=_CALLS,
        prompt=_CHUNKS * _CHUNK_TOKENS,
        chunks=_CHUNKS,
        tokens=_TOKENS,
        messages=len(steps),
        machine=machine_us,
        journal=journal_us,
        unsampled=unsampled_us,
        unsampled_share=unsampled_us / machine_us * 100,
        spans=_num_spans(exported[-1]),
        size=len(exported[-1]),
        sampled=sampled_us,
        sampled_share=sampled_us / machine_us * 100,
        mean=mean_us,
        mean_share=mean_us / machine_us * 100,
    )
    PAGE.write_text(text)
    print(text)


def _tracer(ratio: float, exported: list[bytes]) -> Tracer:
    return Tracer(Sampling(ratio), SpanEncoder({"service.name": "baton-gateway"}), "llama", exported.append)


def _trace(tracer: Tracer, steps: list[Step], machine: RequestMachine) -> None:
    trace = tracer.begin("request", None, 0.0)
    trace.note_request("", "chat")
    trace.prepared(_request(), 0.0)
    trace.admitted(0.0)
    trace.output_ended(_journal(steps), machine, 2.0)
    trace.end(Ending(Outcome.FINISHED, None, "client"), 2.0)


def _journal(steps: list[Step]) -> Journal:
    """As the driver writes it: tokens go past it."""
    journal = Journal(0)
    for event, commands in steps:
        if not isinstance(event, TokensCame):
            journal.event(1.0, event)
            for command in commands:
                journal.command(1.0, command)
    return journal


def _serve(fleet: Fleet, events: list[Event]) -> tuple[RequestMachine, list[Step]]:
    """One request from its first to its last event."""
    machine = RequestMachine(_request(), _RULES, fleet, _Words())
    return machine, [(event, machine.handle([event], 1.0)) for event in events]


_RULES = Rules(
    LocalPolicy.STRICT,
    max_attempts=3,
    max_queue_s=10.0,
    prefill_stall_s=10.0,
    decode_stall_s=30.0,
    failover_wait_s=20.0,
)


def _request() -> Request:
    sampling = ResolvedSampling(max_tokens=_TOKENS, temperature=0.0)
    return Request("request", _PROMPT, sampling, "", started_at_s=0.0, timeout_s=100.0)


def _fleet() -> Fleet:
    model = node_status_pb2.ModelIdentity(name="m", architecture="Llama", config_digest="c", weights_digest="w")
    fleet = Fleet(model, 1 << 20, LocalPolicy.STRICT)
    peer = node_status_pb2.PeerState(
        incarnation=2, name="decode", phase=node_status_pb2.PEER_PHASE_READY, transport="tcp"
    )
    for role, name, incarnation, peers in (
        (node_status_pb2.ROLE_PREFILL, "prefill", 1, [peer]),
        (node_status_pb2.ROLE_DECODE, "decode", 2, []),
    ):
        info = node_status_pb2.NodeInfo(
            name=name,
            role=role,
            incarnation=incarnation,
            model=model,
            max_context_tokens=1 << 20,
            cache_shape=node_status_pb2.CacheShape(block_size=16, layout="NHD"),
        )
        fleet.add(role, name)
        fleet.status_received(role, name, node_status_pb2.NodeStatus(info=info, blocks_free=1 << 20, peers=peers), 0.0)
    return fleet


def _events() -> list[Event]:
    """What two nodes send about the request, with the times of their work."""
    lease = lease_pb2.Lease(number=1)
    ticket = lease_pb2.Ticket(lease=lease, token_start=0, token_stop=len(_PROMPT))
    replies = [prefill_pb2.PrefillEvent(scheduled=prefill_pb2.PrefillScheduled(queue_s=0.1), at_s=0.1)]
    for chunk in range(1, _CHUNKS + 1):
        stop = chunk * _CHUNK_TOKENS
        part = prefill_pb2.SentPart(
            started_s=0.1 * chunk, ended_s=0.1 * chunk + 0.05, token_start=stop - _CHUNK_TOKENS, token_stop=stop,
            segments=8, bytes=1 << 26,
        )  # fmt: skip
        progress = prefill_pb2.PrefillProgress(computed_tokens=stop)
        replies.append(prefill_pb2.PrefillEvent(progress=progress, at_s=0.1 * chunk, parts=[part]))
    first = prefill_pb2.PrefillFirstToken(token=common_pb2.Token(token_id=1, index=0))
    sent = prefill_pb2.PrefillSent(tokens_sent=len(_PROMPT), bytes_sent=1 << 28, segments=32, transport="tcp")
    replies += [
        prefill_pb2.PrefillEvent(first_token=first, at_s=0.5),
        prefill_pb2.PrefillEvent(sent=sent, at_s=0.6),
    ]
    admitted = decode_pb2.Admitted(bytes_received=1 << 28, segments=32, at_s=0.7, filled_s=0.6, handed_over_s=0.65)
    return [
        Started(),
        DecodeReplied(1, decode_pb2.Reserved(ticket=ticket, at_s=0.001)),
        *(PrefillReplied(1, reply) for reply in replies),
        PrefillEnded(1, None),
        DecodeReplied(1, admitted),
        *(TokensCame(1, [_token(index)]) for index in range(1, _TOKENS)),
        DecodeReplied(1, decode_pb2.Released()),
    ]


def _token(index: int) -> decode_pb2.StepToken:
    last = index == _TOKENS - 1
    reason = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
    return decode_pb2.StepToken(token=common_pb2.Token(token_id=1, index=index), finish_reason=reason)


def _num_spans(data: bytes) -> int:
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(data)
    return sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)


def _cost_us(call: Callable[[], object]) -> float:
    return min(_round_us(call) for _ in range(_ROUNDS))


def _round_us(call: Callable[[], object]) -> float:
    began = time.thread_time()
    for _ in range(_CALLS):
        call()
    return (time.thread_time() - began) / _CALLS * 1e6


if __name__ == "__main__":
    main()
