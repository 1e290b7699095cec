"""Plain values that client, gateway, engine and command line share."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.core.errors import InvalidRequest


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Path(StrEnum):
    REMOTE = "remote"
    LOCAL = "local"
    SPLIT = "split"


class LocalPolicy(StrEnum):
    """Where prompts are prefilled."""

    STRICT = "strict"
    PREFER = "prefer"
    LOCAL = "local"
    ELASTIC = "elastic"


class GrammarKind(StrEnum):
    """Languages in which a constraint on the output can be written; `Grammar` on the wire describes each."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    GBNF = "gbnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True)
class Grammar:
    """A constraint on the output: no token is drawn that would break it."""

    kind: GrammarKind
    text: str = ""


class AdapterRef(NamedTuple):
    """One revision of a LoRA adapter, as requests and nodes name it.

    Args:
        revision: digest of its numbers.
    """

    name: str
    revision: str


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    # NOTE: every comparison with NaN is false, so NaN fails for every range.
    if not ok:
        raise InvalidRequest(f"{name} is {value}", field=name, value=value, allowed=(allowed,))


# Not frozen, but never changed: a frozen dataclass takes three times as long to make, and a decode step makes hundreds.
@dataclass(slots=True)
class TokenOutput:
    """One sampled token of a request; `index` is its position in the output, from 0."""

    token_id: int
    index: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class PromptLogprob(NamedTuple):
    """The logprob of one prompt token, given the tokens before it; None for the first token.

    Args:
        top_logprobs: token ids and logprobs of the most probable tokens at this place, best first.
    """

    token_id: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...] = ()


_SLO_MAX_S = 1e6


@dataclass(frozen=True)
class Slo:
    """Bounds on one request's latency; None: no bound.

    Args:
        ttft_s: time from the request's arrival at the gateway to its first token.
        tpot_s: mean time per token after the first.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if value is not None:
                _require(f"slo.{name}", value, 0 < value <= _SLO_MAX_S, f"seconds above 0, up to {_SLO_MAX_S:g}")

    def over(self, defaults: "Slo") -> "Slo":
        """These bounds, and those of `defaults` where this has none."""
        ttft_s = defaults.ttft_s if self.ttft_s is None else self.ttft_s
        return Slo(ttft_s, defaults.tpot_s if self.tpot_s is None else self.tpot_s)

    def missed(self, ttft_s: float, decode_s: float, tokens: int) -> bool:
        """Whether an output that has ended came later than these bounds.

        Args:
            ttft_s: time to its first token; to its end if it has no token.
            decode_s: time from its first token to its end.
            tokens: number of its tokens.
        """
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return True
        return self.tpot_s is not None and tokens > 1 and decode_s / (tokens - 1) > self.tpot_s


NO_SLO = Slo()


@dataclass(frozen=True)
class Objective:
    """What a request gets where its SLO says nothing.

    Args:
        gap_factor: prompts make a step with its next token at most this many times as long.
        ttft_factor: its first token comes within this many times the time to compute its prompt alone, or within
            `LEAST_DUE_S`. While a prompt waits, the steps of others become longer, by one `gap_factor` for each such
            time.
    """

    gap_factor: float = 1.5
    ttft_factor: float = 4.0


DEFAULT_OBJECTIVE = Objective()
# Nobody sees whether a first token comes after 50 or 100 ms, but longer steps are in the gaps of all streams. In the
# simulation of served chat at 70 requests a second, this makes the gaps of a request 16 % shorter and first tokens 5 %
# later (`python -m bench.served`).
LEAST_DUE_S = 0.2


def first_token_due_s(alone_s: float, ttft_factor: float) -> float:
    """When the first token of a prompt without a TTFT is due, from the time to compute it alone; see `Objective`."""
    return max(LEAST_DUE_S, ttft_factor * alone_s)


@dataclass(frozen=True)
class Usage:
    """Tokens of a request.

    Attributes:
        cached_tokens: prompt tokens that no node computed for this request, because prefix caches had their KV.
        reasoning_tokens: those of the completion that a chat spent on reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class LoadedTokens:
    """Tokens whose KV was read into a cache, by the place that had it.

    Attributes:
        store: a store that several nodes share.
        peer: host memory or files of another node.
    """

    host: int = 0
    file: int = 0
    store: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        return self.host + self.file + self.store + self.peer

    def at_most(self, tokens: int) -> "LoadedTokens":
        """The same without what exceeds this number: first count host memory, then files, store and peers."""
        host = min(self.host, tokens)
        file = min(self.file, tokens - host)
        store = min(self.store, tokens - host - file)
        return LoadedTokens(host, file, store, min(self.peer, tokens - host - file - store))


NOTHING_LOADED = LoadedTokens()


@dataclass(frozen=True)
class Receipt:
    """Report of a finished request. The fields are those of `Receipt` on the wire."""

    path: Path
    why: str
    prefill_node: str
    decode_node: str
    prompt_tokens_sent: int
    bytes_sent: int
    segments: int
    transport: str
    queue_s: float
    prefill_s: float
    transfer_s: float
    ttft_s: float
    total_s: float
    attempts: int
    prefill_cached_tokens: int
    segment_bytes: int
    kv_converted: str
    layer_groups: int
    predicted_ttft_s: float | None = None
    split_tokens: int = 0
    revision: str = ""
    revision_name: str = ""
    prefill_version: str = ""
    decode_version: str = ""
    decode_cached_tokens: int = 0
    prefill_loaded_tokens: int = 0
    decode_loaded_tokens: int = 0
    prefill_loaded: LoadedTokens = NOTHING_LOADED
    decode_loaded: LoadedTokens = NOTHING_LOADED
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    request_id: str = ""
