"""Settings of older releases, so that an error can name their replacement. Pure."""

from collections.abc import Callable
from types import MappingProxyType

RENAMED = MappingProxyType({"queue_s": "max_queue_s", "num_blocks": "kv_cache_mib"})
# Measured, derived or constant now.
REMOVED = frozenset(
    {
        "balance_backlog_s", "balance_cool_down_s", "balance_hold_s", "connect_timeout_s", "decode_stall_s", "digests",
        "failover_wait_s", "http_body_mib", "keepalive_s", "layer_groups", "lease_s", "link_retry_s",
        "local_prefill_tokens", "max_attempts", "max_waiting", "poll_s", "prefill_stall_s", "resolve_s", "shed_waiting",
        "staging_slots", "stale_s", "state_slots",
    }
)  # fmt: skip


def cure_of_older(name: str, shown: Callable[[str], str]) -> str | None:
    """What to do instead of setting this name. Returns None if no older release had it.

    Args:
        shown: makes a flag or a variable of a setting's name.
    """
    if name in RENAMED:
        return f"use {shown(RENAMED[name])}"
    return "leave it out: this release measures it or keeps it constant" if name in REMOVED else None
