"""Where one request's prompt is prefilled: on a prefill node, on the decode node, or split between them. Pure.

Each way is predicted from the nodes' measured step costs and backlogs: when the first token comes, and by how much the
streams of the decode node slow down. Of the ways that meet the request's SLO, the one that costs the cluster least is
chosen; if none meets it, the one with the earliest first token; without an SLO, the one with the least queueing.
"""

from dataclasses import dataclass
from enum import Enum

from gateway.router import NodeView


class Way(Enum):
    """How a prompt is computed."""

    REMOTE = "remote"
    LOCAL = "local"
    SPLIT = "split"


@dataclass(frozen=True)
class Placement:
    """The choice for one request.

    Args:
        prefill: None for `Way.LOCAL`.
        split_tokens: `Way.SPLIT`: the prefill node computes the tokens before this one; a multiple of both block sizes.
        why: one sentence for the receipt.
        predicted_ttft_s: from now to the first token; None: not known.
    """

    way: Way
    decode: NodeView
    prefill: NodeView | None
    split_tokens: int
    why: str
    predicted_ttft_s: float | None
