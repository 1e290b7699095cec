"""Predicts which pull of KV a node would begin if it computed a prompt, and at what price. Pure.

`baton.gateway.fleet.cached_tokens` and the simulation of `baton plan` both choose nodes by it.
"""

from baton.core.kv_entries import ENTRY_TOKENS
from baton.core.pull_costs import predicted_pull_s
from baton.gateway.fleet.node_view import NodeView, PossiblePull

# Nodes decide by their own measurements whether to pull KV, but none would pull less than this.
MUCH_MORE_TOKENS = 128


def with_shared_read(view: NodeView, most: int) -> NodeView:
    """The view with the read of KV that the store which the node shares with others is likely to have.

    Args:
        most: leading tokens of the prompt that one of these nodes has.
    """
    if view.costs is None or most < view.cached_tokens + MUCH_MORE_TOKENS:
        return view
    stop = most // ENTRY_TOKENS * ENTRY_TOKENS
    tokens, compute_s = stop - view.cached_tokens, view.prompt_s(view.cached_tokens, stop)
    state_tokens = view.state_bytes / view.kv_bytes_per_token if view.kv_bytes_per_token else 0.0
    read_s = (tokens + state_tokens) * view.read_token_s
    if read_s >= compute_s:  # then the node does not read it
        return view
    return view.with_pull(PossiblePull(stop, tokens, read_s, compute_s, "the shared store"))


def with_possible_pull(view: NodeView, most: int, source: str) -> NodeView:
    """The view with the pull that the node would begin, by the costs that it has measured.

    Args:
        most: leading tokens of the prompt that another node has.
        source: label of that node.
    """
    if view.costs is None or most < view.cached_tokens + MUCH_MORE_TOKENS:
        return view
    stop = most // ENTRY_TOKENS * ENTRY_TOKENS
    tokens, compute_s = stop - view.cached_tokens, view.prompt_s(view.cached_tokens, stop)
    num_bytes = tokens * view.kv_bytes_per_token + view.state_bytes
    pull_s = predicted_pull_s(view.pull_costs, tokens, num_bytes, compute_s)
    return view if pull_s is None else view.with_pull(PossiblePull(stop, tokens, pull_s, compute_s, source))
