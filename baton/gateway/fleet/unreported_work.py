"""The work that was sent to one node since its last status, which does not have it. Pure."""

from baton.core.pools import blocks_for, take_from_roomiest
from baton.gateway.core.shared_sends import NOTHING, NodeSends
from baton.gateway.fleet.backlog import Backlog
from baton.gateway.fleet.node_report import seconds_of
from baton.protos.v1 import node_status_pb2


class UnreportedWork:
    """What this process of a gateway has sent to a node since the node's last status, and what the others have.

    Args:
        sends: what all processes of the gateway send to the node; None: there is only this process.
        decodes: whether the node decodes most of what the others send.

    Attributes:
        requests: number of requests.
        prompts: number of requests that decode elsewhere.
        tokens: of the requests, without those that the node had cached.
    """

    def __init__(self, sends: NodeSends | None, *, decodes: bool) -> None:
        self.requests = self.prompts = self.tokens = 0
        self._block_size = 1
        self._open_blocks = [0]  # open blocks of each pool, less those of the requests
        self._backlog = Backlog()
        self._decodes = decodes
        self._sends = sends
        self._version = 0  # the last version of `_sends` that was counted
        self._by_others = NOTHING if sends is None else sends.by_others()  # as it was counted

    @property
    def room_tokens(self) -> int:
        """Tokens of the longest request for which the node has room."""
        return max(self._open_blocks) * self._block_size

    def queue_s(self, now_s: float) -> float:
        """Predicted wait of a prompt that is sent now."""
        return self._backlog.at(now_s)

    def add_prompt(self, seconds: float, now_s: float) -> None:
        """Adds a prompt, or a part of one, which the node is predicted to compute in this time."""
        self._backlog.add(seconds, now_s)
        if self._sends is not None:
            self._sends.add_prompt(seconds)

    def add_request(self, num_tokens: int, *, cached_tokens: int, decodes: bool) -> None:
        """Adds a request.

        Args:
            cached_tokens: how many of its tokens the node has in its cache.
            decodes: whether the request also decodes there.
        """
        self.requests += 1
        self.prompts += not decodes
        self.tokens += num_tokens - cached_tokens
        # The node counts one more token too: the first decoded one.
        take_from_roomiest(self._open_blocks, blocks_for(num_tokens + 1 - cached_tokens, self._block_size))
        if self._sends is not None:
            self._sends.add_request(num_tokens - cached_tokens)

    def count_others(self) -> bool:
        """Counts what other processes of this gateway have sent since the last call. Returns whether there is any."""
        if self._sends is None or self._sends.version == self._version:
            return False
        self._version = self._sends.version
        before, sent = self._by_others, self._sends.by_others()
        if sent == before:
            return False
        self._by_others = sent
        requests, tokens = sent.requests - before.requests, sent.tokens - before.tokens
        self.requests += requests
        if not self._decodes:
            self.prompts += requests
        self.tokens += tokens
        for _ in range(requests):  # in equal parts, because only their sum is known
            take_from_roomiest(self._open_blocks, blocks_for(tokens // requests + 1, self._block_size))
        self._backlog.add_earlier((sent.prompt_ns - before.prompt_ns) / 1e9)
        return True

    def reported(self, status: node_status_pb2.NodeStatus, now_s: float) -> None:
        """A status has come, which has everything that was sent before it."""
        if self._sends is not None:
            self._by_others = self._sends.by_others()
        self.requests = self.prompts = self.tokens = 0
        self._block_size = max(1, status.info.cache_shape.block_size)
        self._open_blocks = list(status.blocks_open) or [status.blocks_free]
        self._backlog.reported(seconds_of(status.backlog_s), now_s)
