"""Events and values that the tests of the prefill node share: one prompt of 8 tokens for a model of 4 layers."""

from itertools import pairwise

from baton.core.types import FinishReason, TokenOutput
from baton.engine.events import (
    ChunkComputed,
    LayersComputed,
    PromptScored,
    RequestFailed,
    RequestStarted,
    StepEvents,
    TokenSampled,
    TokensDrafted,
)
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.protos.internal.v1 import lease_pb2
from baton.protos.internal.v1 import prefill_pb2 as pb
from kvtransfer.records import SendJob
from kvtransfer.segments import Segment
from prefill_node.commands import Command
from prefill_node.events import Called, Event, PeerFacts, StepDone
from prefill_node.machine import PrefillMachine, PrefillRules

LAYERS = 4
PROMPT = tuple(range(100, 108))
INCARNATION = 0xABC
PEER = PeerFacts(number=64, sender_number=7, transport="loopback", kv_converted="", max_context_tokens=512)
OTHER_PEER = PeerFacts(number=128, sender_number=9, transport="tcp", kv_converted="", max_context_tokens=512)
BLOCKS = (3, 1, 2)


SPEC = KVCacheSpec(KVKind.GQA, LAYERS, num_kv_heads=2, head_dim=4, dtype="float32")


def machine(spec: KVCacheSpec = SPEC, *, prefetches: bool = False) -> PrefillMachine:
    return PrefillMachine(PrefillRules("prefill-0", spec, prefetches=prefetches))


def ticket(
    lease: int = 5,
    *,
    token_start: int = 0,
    token_stop: int = len(PROMPT),
    resume_at: int | None = None,
    key: bytes = b"",
) -> lease_pb2.Ticket:
    return lease_pb2.Ticket(
        lease=lease_pb2.Lease(number=lease, incarnation=INCARNATION, key=key),
        decode_node="decode-0",
        decode_address="127.0.0.1:1",
        token_start=token_start,
        token_stop=token_stop,
        resume_at=token_start if resume_at is None else resume_at,
    )


def request(granted: lease_pb2.Ticket | None = None) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        request_id="r", prompt_token_ids=PROMPT, cache_salt="salt", ticket=ticket() if granted is None else granted
    )


def called(
    call: int = 1,
    granted: lease_pb2.Ticket | None = None,
    *,
    peer: PeerFacts = PEER,
    layers_per_group: int = LAYERS,
) -> Called:
    return Called(call, request(granted), peer, layers_per_group)


def step(
    *events: RequestStarted
    | LayersComputed
    | ChunkComputed
    | PromptScored
    | TokensDrafted
    | TokenSampled
    | RequestFailed,
    seconds: float = 0.0,
) -> StepDone:
    """One step's events, each in its place."""
    return StepDone(
        StepEvents(
            1,
            seconds,
            started=tuple(event for event in events if isinstance(event, RequestStarted)),
            chunks=tuple(event for event in events if isinstance(event, ChunkComputed)),
            tokens=tuple(event for event in events if isinstance(event, TokenSampled)),
            failed=tuple(event for event in events if isinstance(event, RequestFailed)),
            layers=tuple(event for event in events if isinstance(event, LayersComputed)),
            scored=tuple(event for event in events if isinstance(event, PromptScored)),
            drafted=tuple(event for event in events if isinstance(event, TokensDrafted)),
        )
    )


def started(call: int = 1, *, cached_tokens: int = 0, queue_s: float = 0.0) -> RequestStarted:
    return RequestStarted(str(call), cached_tokens, queue_s)


def chunk(token_stop: int, call: int = 1) -> ChunkComputed:
    return ChunkComputed(str(call), 0, token_stop, BLOCKS)


def layers(token_stop: int, layer_stop: int, call: int = 1) -> LayersComputed:
    return LayersComputed(str(call), 0, token_stop, layer_stop, BLOCKS)


def sampled(call: int = 1, finish_reason: FinishReason | None = None) -> TokenSampled:
    return TokenSampled(str(call), TokenOutput(token_id=42, index=0), finish_reason, "")


def segments_of(job: SendJob, *, pieces: int = 1) -> tuple[Segment, ...]:
    """The transfer's report of a job that was cut into that many segments by tokens: 10 bytes for each token of each
    layer."""
    assert job.layers is not None
    bounds = [job.token_start + (job.token_stop - job.token_start) * i // pieces for i in range(pieces + 1)]
    return tuple(
        Segment(
            incarnation=job.incarnation,
            lease=job.lease,
            number=job.first_segment + i,
            layer_start=job.layers.start,
            layer_stop=job.layers.stop,
            token_start=start,
            token_stop=stop,
            head_start=0,
            head_stop=1,
            payload_bytes=10 * len(job.layers) * (stop - start),
        )
        for i, (start, stop) in enumerate(pairwise(bounds))
    )


def play(under_test: PrefillMachine, *events: Event, now_s: float = 0.0) -> list[Command]:
    """The commands for events that happen one after the other."""
    return [command for event in events for command in under_test.handle(event, now_s)]
