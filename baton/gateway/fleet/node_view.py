"""The view of one node that the choice of nodes compares: its load, its costs, and what it has of one prompt. Pure.

Nodes report at intervals. The work that this gateway has sent since the last report is added, so that a burst spreads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from baton.core.costs import StepCosts, chunk_pairs
from baton.core.decode_pace import DecodePace
from baton.core.pull_costs import PullCosts
from baton.core.types import AdapterRef

_STEP_TOKENS = 2048  # assumed for a node that does not report its step size


@dataclass(frozen=True)
class PossiblePull:
    """KV of a prompt that a node would pull from another one if it computed the prompt.

    Attributes:
        stop: the leading tokens that the node has then.
        seconds: predicted time of the pull.
        saved_s: predicted time to compute the pulled tokens.
        source: label of the other node.
    """

    stop: int
    tokens: int
    seconds: float
    saved_s: float
    source: str

    def __str__(self) -> str:
        return (
            f"pulls {self.tokens} tokens from {self.source} in about {self.seconds:.2g} s, "
            f"and would compute them in {self.saved_s:.2g} s"
        )


@dataclass(frozen=True)
class NodeView:
    """The state of one node that the choice uses. `open`: whether the node is reachable and takes new requests."""

    address: str
    incarnation: int
    revision: str
    open: bool
    max_context_tokens: int
    block_size: int
    room_tokens: int  # tokens for which one more request finds blocks, after the requests sent since the report
    requests: int  # running and waiting
    tokens_waiting: int
    ready_peers: frozenset[int]  # incarnations
    requests_since: int = 0  # sent by this gateway since the report
    streams_since: int = 0  # of these, those that decode on the node
    tokens_since: int = 0  # tokens of these requests that the node must compute
    turn: int = 0  # number of this gateway's last choice of the node, for round robin among equal nodes
    costs: StepCosts | None = None  # None: not measured yet
    backlog_s: float = 0.0  # predicted time for all waiting prompt tokens
    decode_rows: int = 0
    context_tokens: int = 0  # keys that one token of every decoding request reads, in all
    pace: DecodePace | None = None  # of its decode steps with draft tokens; None: no speculation
    max_batch_requests: int = 0  # 0: unknown
    max_batch_tokens: int = 0
    also_prefills: bool = False  # whether this is a prefill node that serves requests alone
    adapters: frozenset[AdapterRef] = frozenset()
    cached_tokens: int = 0  # cached part of this request's prompt, as far as this gateway knows
    outside_tokens: int = 0  # the end of this part, which the node must load from host memory first
    below_tokens: int = 0  # of these, those that are not in host memory either, but in files or a shared store
    load_token_s: float = 0.0  # predicted time to load the KV of a token
    read_token_s: float = 0.0  # predicted time to read the KV of a token from files or a shared store before
    pull: PossiblePull | None = None  # for this request's prompt; None: the node would pull nothing
    pull_s: float = 0.0  # of the pull that `cached_tokens` and `outside_tokens` count on, see `computing`
    pull_costs: PullCosts | None = None  # None: not measured yet
    kv_bytes_per_token: int = 0
    state_bytes: int = 0  # size of a request's recurrent state
    # Measured speeds of a prefill node's pairs, by the decode node's incarnation.
    peer_bytes_per_s: Mapping[int, float] = field(default_factory=dict, hash=False)
    second_token_s: float = 0.0  # from the first token of a hand-over to this node to the second one; 0: unknown
    name: str = ""

    @property
    def label(self) -> str:
        """The node's name for clients, which must not see internal addresses."""
        return self.name or self.address

    @property
    def load(self) -> int:
        return self.requests + self.requests_since

    @property
    def streams(self) -> int:
        """Requests that decode on the node, or will. Other requests of a prefill node are prompts for other nodes."""
        return self.decode_rows + self.streams_since if self.also_prefills else self.load

    @cached_property
    def step_tokens(self) -> int:
        """Number of prompt tokens that one step computes."""
        return self.max_batch_tokens or _STEP_TOKENS

    @cached_property
    def step_s(self) -> float:
        """Predicted time of a full prompt step without attention; infinite without costs."""
        return inf if self.costs is None else self.costs.prompt_tokens_s(self.step_tokens)

    @cached_property
    def queue_s(self) -> float:
        """Predicted wait of a prompt that is sent now; infinite without costs."""
        return self.backlog_s + self.step_s / self.step_tokens * self.tokens_since if self.costs is not None else inf

    @property
    def load_s(self) -> float:
        """Predicted time to load what is outside of the cache, and to pull what is on another node before."""
        return self.outside_tokens * self.load_token_s + self.below_tokens * self.read_token_s + self.pull_s

    @property
    def wait_s(self) -> float:
        """Predicted time until the prompt's first token can be computed: it is loaded while others are computed."""
        return max(self.queue_s, self.load_s)

    def prompt_s(self, start: int, stop: int) -> float:
        """Predicted time for a prompt's tokens from `start` to `stop`, without waiting; infinite without costs."""
        costs = self.costs
        if costs is None:
            return inf
        # Equals `StepCosts.prompt_s`, but reuses `step_s`, which is computed once per view.
        start = min(start, stop - 1)
        whole, rest = divmod(stop - start, self.step_tokens)
        dense_s = whole * self.step_s + (costs.prompt_tokens_s(rest) if rest else 0.0)
        return dense_s + costs.pair_s * chunk_pairs(start, stop)

    def prefill_s(self, start: int, stop: int) -> float:
        """Predicted time until these tokens are computed, including the wait."""
        return self.wait_s + self.prompt_s(start, stop)

    def has_room(self, num_tokens: int) -> bool:
        return self.room_tokens >= num_tokens

    def with_cached(self, cached_tokens: int, outside_tokens: int = 0, below_tokens: int = 0) -> "NodeView":
        """A copy for one prompt, with the number of its tokens that the node has cached, must load first, and must read
        from files or a shared store before.

        A copy is made for each node and request, so this copies the fields without `__init__`.
        """
        view = object.__new__(NodeView)
        view.__dict__.update(self.__dict__)
        view.__dict__["cached_tokens"] = cached_tokens
        view.__dict__["outside_tokens"] = outside_tokens
        view.__dict__["below_tokens"] = below_tokens
        return view

    def with_pull(self, pull: PossiblePull) -> "NodeView":
        """A copy with a pull that the node would begin if it computed the prompt."""
        view = object.__new__(NodeView)
        view.__dict__.update(self.__dict__)
        view.__dict__["pull"] = pull
        return view

    @property
    def computing(self) -> "NodeView":
        """The view of the node as the one that computes the prompt, after the pull if there is one. A node that only
        receives the prompt's KV pulls nothing."""
        pull = self.pull
        if pull is None or self.pull_s:
            return self
        view = self.with_cached(pull.stop, self.outside_tokens + pull.stop - self.cached_tokens, self.below_tokens)
        view.__dict__["pull_s"] = pull.seconds
        return view

    def with_queue(self, queue_s: float, *, second_token_s: float = 0.0) -> "NodeView":
        """A copy for a time after the report, with the wait of a prompt that is sent then, and with the delay of the
        second token of a hand-over."""
        view = object.__new__(NodeView)
        view.__dict__.update(self.__dict__)
        view.__dict__["queue_s"] = queue_s
        view.__dict__["second_token_s"] = second_token_s
        return view
