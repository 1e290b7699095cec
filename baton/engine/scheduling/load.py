"""Computes how full an engine is, and which blocks one more request may take; admission and statuses share it. Pure."""

from collections.abc import Sequence

from baton.core.decode_pace import PLAIN_PACE, DecodePace
from baton.engine.request import EngineLimits, EngineLoad
from baton.engine.scheduling.prompts import Prompts
from baton.engine.scheduling.request_blocks import RequestBlocks
from baton.engine.scheduling.roster import Roster
from baton.engine.scheduling.state import RequestState


def open_blocks(roster: Roster, blocks: RequestBlocks, limits: EngineLimits) -> tuple[int, ...]:
    """The blocks of each pool that a new request may take. A request fits if one pool has all its blocks."""
    waiting = roster.waiting
    if not blocks.states.has_room(others=len(waiting)):
        return (0,) * blocks.num_pools
    most = stream_blocks(roster, blocks, limits, waiting)
    return tuple(max(0, min(room, most)) for room in blocks.room(roster.decoders(), waiting))


def stream_blocks(roster: Roster, blocks: RequestBlocks, limits: EngineLimits, before: Sequence[RequestState]) -> int:
    """Blocks of all pools that `stream_share` leaves for one more request that decodes here.

    Args:
        before: the requests that wait before the new one.
    """
    share = limits.stream_share
    if share == 1.0:
        return blocks.num_blocks
    num_streams = roster.num_streams
    if num_streams == 0 and not before:
        return blocks.num_blocks
    if num_streams + 1 > share * roster.seats:
        return 0
    return int(share * blocks.num_blocks) - roster.num_stream_blocks


def engine_load(
    roster: Roster,
    blocks: RequestBlocks,
    prompts: Prompts,
    limits: EngineLimits,
    *,
    preemptions: int,
    pace: DecodePace | None,
) -> EngineLoad:
    """The load.

    Args:
        pace: of the latest decode steps; None: nothing is drafted.
    """
    decoding = roster.decoding()
    return EngineLoad(
        blocks_total=blocks.num_blocks,
        blocks_free=blocks.num_free,
        blocks_open=open_blocks(roster, blocks, limits),
        blocks_leased=roster.num_leased,
        requests_running=len(roster.running),
        requests_waiting=len(roster.waiting) + len(roster.ready),
        tokens_waiting=sum(state.prompt_remaining for state in roster.in_prompt()),
        requests_total=roster.arrivals,
        preemptions=preemptions,
        backlog_s=prompts.backlog_s,
        decode_rows=len(decoding),
        context_tokens=sum(state.num_tokens for state in decoding),
        refused_late=prompts.num_refused,
        cache_queries=blocks.queried_tokens,
        cache_hits=blocks.hit_tokens,
        pace=pace if pace is None or decoding else PLAIN_PACE,
    )
