"""Cuts a job into segments, part by part in the parts' order, so that a state comes last. Pure; no torch."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from baton.core.errors import ConfigError
from baton.kvcache.spec import KVKind
from kvtransfer.flows import Flow, common
from kvtransfer.parts import Part, part_with
from kvtransfer.records import SendJob
from kvtransfer.segments import SEGMENTS_MAX, Segment, SegmentPiece, cut, payload_bytes


class _Share(NamedTuple):
    """A job's share of one part. Layers have the part's own numbers, heads the model's."""

    part: Part
    layers: range
    token_start: int
    heads: range


def segments_of(
    job: SendJob, parts: Sequence[Part], *, payload_for: Callable[[int], int], is_sealed: bool
) -> Iterator[Segment]:
    """The segments of a job, without their digests.

    Args:
        parts: of the sender's rank, in the dtypes that travel.
        payload_for: maps a job's bytes to the largest payload of one message.

    Raises:
        ConfigError: the job needs more segments than tags can number.
    """
    shares = list(_shares(job, parts))
    limit = payload_for(sum(_share_bytes(share, job.token_stop) for share in shares))
    pieces = ((share.part, heads, piece) for share in shares for heads, piece in _pieces(share, job, limit))
    for number, (part, heads, (layers, start, stop)) in enumerate(pieces, start=job.first_segment):
        if number >= SEGMENTS_MAX:
            raise ConfigError(
                f"lease {job.lease} needs more than {SEGMENTS_MAX} segments",
                field="segment_bytes",
                value=limit,
                cure="raise --segment-mib",
            )
        yield Segment(
            incarnation=job.incarnation,
            lease=job.lease,
            number=number,
            layer_start=part.layers.start + layers.start,
            layer_stop=part.layers.start + layers[-1] + 1,
            layer_step=layers.step,
            token_start=start,
            token_stop=stop,
            head_start=heads.start,
            head_stop=heads.stop,
            payload_bytes=payload_bytes(part.spec, layers=len(layers), tokens=stop - start, heads=len(heads)),
            key=job.key if is_sealed else b"",
        )


def _shares(job: SendJob, parts: Sequence[Part]) -> Iterator[_Share]:
    carried: Sequence[Flow | Part] = job.flows or parts
    for flow in carried:
        part = part_with(parts, flow.layers)
        assert part is not None, "a flow lies in one part"
        layers = flow.layers if job.layers is None else common(flow.layers, job.layers)
        without_state = job.layers is None and job.state_slot < 0 and part.spec.kind is KVKind.STATE
        if layers and not without_state:
            own_layers = range(layers.start - part.layers.start, layers.stop - part.layers.start)
            yield _Share(part, own_layers, part.spec.first_kept(job.token_start, job.token_stop), flow.heads)


def _share_bytes(share: _Share, token_stop: int) -> int:
    tokens = token_stop - share.token_start
    return payload_bytes(share.part.spec, layers=len(share.layers), tokens=tokens, heads=len(share.heads))


def _pieces(share: _Share, job: SendJob, limit: int) -> Iterator[tuple[range, SegmentPiece]]:
    """The pieces of a share, each with its heads: all of them, unless a state's layer is larger than a segment."""
    spec = share.part.spec
    segment_bytes = max(limit, spec.least_segment_bytes)
    heads_each = segment_bytes // payload_bytes(spec, layers=1, tokens=1, heads=1)
    for first in range(0, len(share.heads), heads_each):
        heads = share.heads[first : first + heads_each]
        for piece in cut(
            spec,
            segment_bytes=segment_bytes,
            layers=share.layers,
            heads=len(heads),
            token_start=share.token_start,
            token_stop=job.token_stop,
            resume_at=job.resume_at,
        ):
            yield heads, piece
