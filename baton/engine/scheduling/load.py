"""How full an engine is, from its scheduler's parts. Pure."""

from baton.engine.request import EngineLimits, EngineLoad
from baton.engine.scheduling.open_blocks import open_blocks
from baton.engine.scheduling.prompts import Prompts
from baton.engine.scheduling.request_blocks import RequestBlocks
from baton.engine.scheduling.roster import Roster


def engine_load(
    roster: Roster, blocks: RequestBlocks, prompts: Prompts, limits: EngineLimits, *, preemptions: int
) -> EngineLoad:
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
    )
