"""Named steps of the hand-over between a prefill and a decode node, at which a forked node can be made to die.

Each step is before or after a call of the product. `die_at` runs in the node's process before it starts.
"""

import functools
import importlib
import inspect
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """A call of the product.

    Attributes:
        before: the node dies before the call; else after it.
    """

    module: str
    owner: str
    method: str
    before: bool = False


_PEER, _PEERS, _RANKED = "prefill_node.decode_peer", "prefill_node.decode_peers", "kvtransfer.ranked"
_PREFILL = {
    "has said hello": Step(_PEER, "DecodePeer", "_introduce"),
    "listens": Step(_RANKED, "RankedTransfer", "listen"),
    "connects its links": Step(_RANKED, "RankedTransfer", "connect", before=True),
    "has connected its links": Step(_RANKED, "RankedTransfer", "connect"),
    "has sent the warm-up": Step(_RANKED, "RankedTransfer", "warm_up"),
    "has paired": Step(_PEER, "DecodePeer", "_handshake"),
    "has a ticket": Step(_PEERS, "DecodePeers", "for_ticket"),
    "sends KV": Step("kvtransfer.sender", "Sender", "_post"),
    "has sent KV": Step(_RANKED, "RankedTransfer", "send"),
    "hands over": Step(_PEERS, "DecodePeers", "send", before=True),
    "has handed over": Step(_PEERS, "DecodePeers", "send"),
    "becomes quiet": Step(_RANKED, "RankedTransfer", "quiet"),
}
_DECODE = {
    "has accepted the hello": Step(_RANKED, "RankedTransfer", "listen"),
    "connects its links": Step(_RANKED, "RankedTransfer", "connect", before=True),
    "has connected its links": Step(_RANKED, "RankedTransfer", "connect"),
    "waits for the warm-up": Step(_RANKED, "RankedTransfer", "warmed_up", before=True),
    "has measured": Step(_RANKED, "RankedTransfer", "warmed_up"),
    "opens a lease": Step(_RANKED, "RankedTransfer", "open_lease", before=True),
    "has opened a lease": Step(_RANKED, "RankedTransfer", "open_lease"),
    "receives KV": Step("kvtransfer.receiver", "Receiver", "_scattered"),
    "has all KV": Step("decode_node.driver", "DecodeDriver", "_on_filled"),
    "closes a lease": Step(_RANKED, "RankedTransfer", "close_lease", before=True),
    "has closed a lease": Step(_RANKED, "RankedTransfer", "close_lease"),
}
PREFILL_STEPS, DECODE_STEPS = tuple(_PREFILL), tuple(_DECODE)
_DAMAGED_EVERY = 5


def step_of(role: str, name: str) -> Step:
    return (_PREFILL if role == "prefill" else _DECODE)[name]


def die_at(step: Step) -> None:
    """In a node's process: it is killed at the step."""
    owner = getattr(importlib.import_module(step.module), step.owner)
    method = getattr(owner, step.method)
    setattr(owner, step.method, _deadly(method, before=step.before))


def damage_segments() -> None:
    """In a prefill node's process: of the segments that it sends, every fifth loses a bit after its digest is made."""
    from kvtransfer.sender import Sender

    post = Sender._post
    count = 0

    def post_damaged(self: Sender, item: Any) -> Any:
        nonlocal count
        count += 1
        if count % _DAMAGED_EVERY == 0 and item.job.lease is not None:
            item.slot.memory[item.segment.payload_bytes // 2] ^= 1
        return post(self, item)

    Sender._post = post_damaged  # type: ignore[method-assign]


def _deadly(method: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def killed_later(*args: Any, **kwargs: Any) -> Any:
            if not before:
                await method(*args, **kwargs)
            _die()

        return killed_later

    @functools.wraps(method)
    def killed(*args: Any, **kwargs: Any) -> Any:
        if not before:
            method(*args, **kwargs)
        _die()

    return killed


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
