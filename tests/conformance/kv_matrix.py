"""The matrix of hand-overs: its parameters, their valid combinations, and the bytes planted in each. Pure.

It derives the expected caches from shapes alone; of the code under test it uses only specs and layouts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.kvcache.layout import GQA_LAYOUTS, MLA_LAYOUTS, KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from tests.conformance.covering import Row, Rule, Space, covering

Bytes = NDArray[np.uint8]

NUM_LAYERS = 4
BLOCK_SIZES = (8, 16, 32, 64, 128)
RANKS = (1, 2, 4)
# kind, kv heads and channels; two heads on four ranks are there twice, and rows of 12 channels are not a power of two.
KINDS = {
    "mla": (KVKind.MLA, 1, 12),
    "gqa": (KVKind.GQA, 4, 8),
    "gqa-2": (KVKind.GQA, 2, 8),
    "mqa": (KVKind.GQA, 1, 8),
}
# With gaps of one layer, and with no order at all: as boxes of the wire, layers 1 and 3 in one, and 1 to 3 in one.
WINDOWS = {"none": (), "every-second": (5, 0, 5, 0), "uneven": (5, 0, 20, 20)}
SEGMENTS = ("whole", "layers", "tokens")


@dataclass(frozen=True)
class Length:
    """A prompt's length: a number of P's blocks, of D's, or of their least common multiple, plus some tokens."""

    blocks: int
    of: str
    more: int

    def tokens(self, block_p: int, block_d: int) -> int:
        size = {"P": block_p, "D": block_d, "lcm": math.lcm(block_p, block_d)}[self.of]
        return self.blocks * size + self.more

    def __str__(self) -> str:
        return f"{self.blocks}{self.of}{self.more:+}"


LENGTHS = (
    Length(0, "P", 1),
    *(Length(blocks, of, more) for of in "PD" for blocks, more in ((1, -1), (1, 0), (1, 1), (2, 0), (3, 3))),
    Length(2, "lcm", -1),
    Length(2, "lcm", 1),
)
LONGEST = 3 * max(BLOCK_SIZES) + 3


@dataclass(frozen=True)
class Side:
    """A node's own choices."""

    layout: KVCacheLayout
    block_size: int
    ranks: int


@dataclass(frozen=True)
class Nodes:
    """Two nodes that serve one model. Fields are named as in `PARAMETERS`."""

    kind: str
    dtype: str
    windows: str
    layout_p: KVCacheLayout
    layout_d: KVCacheLayout
    block_p: int
    block_d: int
    ranks_p: int
    ranks_d: int
    segments: str
    digests: bool

    @property
    def prefill(self) -> Side:
        return Side(self.layout_p, self.block_p, self.ranks_p)

    @property
    def decode(self) -> Side:
        return Side(self.layout_d, self.block_d, self.ranks_d)

    @property
    def spec(self) -> KVCacheSpec:
        """Of the whole model."""
        kind, heads, channels = KINDS[self.kind]
        return KVCacheSpec(kind, NUM_LAYERS, heads, channels, self.dtype, WINDOWS[self.windows])

    @property
    def segment_bytes(self) -> int:
        """Room for a whole request in a message, for some layers of one, or for a few tokens of one layer."""
        per_token = self.spec.bytes_per_token_layer
        return {"whole": LONGEST * NUM_LAYERS, "layers": LONGEST * 3 // 2, "tokens": 12}[self.segments] * per_token


@dataclass(frozen=True)
class Request:
    """A prompt, and the parts of it that the nodes have beforehand. Fields are named as in `PARAMETERS`.

    Attributes:
        prefix_p: partial: P has some of its first blocks from another request, which goes to D at the same time.
        prefix_d: partial: D has half of the prompt's full blocks; whole: all but what must be computed.
        chunks: several: P computes it in chunks, each of which is a job.
    """

    length: Length
    prefix_p: str
    prefix_d: str
    chunks: str


@dataclass(frozen=True)
class Case:
    """One hand-over in figures. All ranges are of token numbers in the prompt.

    Attributes:
        cached_p: tokens in blocks that P shares with another request.
        cached_d: tokens that D has.
        resume_at: the earliest token that may be computed on top.
    """

    num_tokens: int
    cached_p: int
    cached_d: int
    resume_at: int
    chunks: str

    @property
    def jobs(self) -> tuple[tuple[int, int], ...]:
        """P's jobs in order: each sends what D lacks of the tokens computed since the last one."""
        if self.chunks == "one":
            return ((self.cached_d, self.num_tokens),)
        to_compute = self.num_tokens - max(self.cached_p, self.cached_d)
        each = max(1, to_compute * 2 // 5)
        stops = [*range(self.num_tokens - to_compute + each, self.num_tokens, each), self.num_tokens]
        return tuple(zip([self.cached_d, *stops], stops, strict=False))

    def reads(self, spec: KVCacheSpec) -> NDArray[np.bool_]:
        """[L, T]: D lacks the token and token `resume_at` attends to it. Later tokens attend to no others of these."""
        window_L1 = np.array(spec.windows or [0] * spec.num_layers)[:, None]
        token_T = np.arange(self.num_tokens)
        in_window: NDArray[np.bool_] = (window_L1 == 0) | (self.resume_at - token_T < window_L1)
        return in_window & (token_T >= self.cached_d)


def case_of(request: Request, *, block_p: int, block_d: int) -> Case:
    """The request as a case for nodes with these block sizes."""
    num_tokens = request.length.tokens(block_p, block_d)
    # One token is always computed, and only full blocks are found again.
    found_p, found_d = (num_tokens - 1) // block_p, (num_tokens - 1) // block_d
    cached_p = {"none": 0, "partial": (found_p + 1) // 2}[request.prefix_p] * block_p
    cached_d = {"none": 0, "partial": found_d // 2, "whole": found_d}[request.prefix_d] * block_d
    # As in an engine: all full blocks of this prompt but the last one may begin another prompt.
    resume_at = max(cached_d, num_tokens // block_d * block_d - block_d + 1)
    return Case(num_tokens, cached_p, cached_d, resume_at, request.chunks)


# ---- the cases

PARAMETERS: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "layout_p": (*GQA_LAYOUTS, *MLA_LAYOUTS),
    "layout_d": (*GQA_LAYOUTS, *MLA_LAYOUTS),
    "block_p": BLOCK_SIZES,
    "block_d": BLOCK_SIZES,
    "ranks_p": RANKS,
    "ranks_d": RANKS,
    "dtype": ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "windows": tuple(WINDOWS),
    "segments": SEGMENTS,
    "digests": (True, False),
    "length": LENGTHS,
    "prefix_p": ("none", "partial"),
    "prefix_d": ("none", "partial", "whole"),
    "chunks": ("one", "several"),
}


def _fits_kind(kind: str, layout: KVCacheLayout) -> bool:
    return layout in (MLA_LAYOUTS if kind == "mla" else GQA_LAYOUTS)


def _has_prefix_p(length: Length, block_p: int, block_d: int, prefix_p: str) -> bool:
    return prefix_p == "none" or length.tokens(block_p, block_d) > block_p


def _has_prefix_d(length: Length, block_p: int, block_d: int, prefix_d: str) -> bool:
    """A partial prefix is at least one block and not all of them."""
    needed = {"none": 0, "partial": 2, "whole": 1}[prefix_d]
    return length.tokens(block_p, block_d) > needed * block_d


def _has_chunks(length: Length, block_p: int, block_d: int, prefix_p: str, prefix_d: str, chunks: str) -> bool:
    if chunks == "one":
        return True
    case = case_of(Request(length, prefix_p, prefix_d, chunks), block_p=block_p, block_d=block_d)
    return len(case.jobs) > 1


MATRIX = Space(
    PARAMETERS,
    (
        Rule(("kind", "layout_p"), _fits_kind),
        Rule(("kind", "layout_d"), _fits_kind),
        Rule(("length", "block_p", "block_d", "prefix_p"), _has_prefix_p),
        Rule(("length", "block_p", "block_d", "prefix_d"), _has_prefix_d),
        Rule(("length", "block_p", "block_d", "prefix_p", "prefix_d", "chunks"), _has_chunks),
    ),
)


@dataclass(frozen=True)
class Trial:
    """Two nodes, and requests that are handed over between them one after the other."""

    nodes: Nodes
    requests: tuple[Request, ...]

    def __str__(self) -> str:
        nodes, first = self.nodes, self.requests[0]
        request = f"{first.length}-P:{first.prefix_p}-D:{first.prefix_d}-{first.chunks}"
        return (
            f"{nodes.kind}-{nodes.dtype}-window:{nodes.windows}"
            f"-P:{nodes.layout_p.name}x{nodes.block_p}x{nodes.ranks_p}"
            f"-D:{nodes.layout_d.name}x{nodes.block_d}x{nodes.ranks_d}"
            f"-{nodes.segments}-digests:{nodes.digests}"
            f"-{request if len(self.requests) == 1 else f'{len(self.requests)} requests'}"
        )


def pairwise_trials() -> list[Trial]:
    """Trials of one request each; any two values of any two parameters meet in one of them."""
    return [Trial(_pick(Nodes, row), (_pick(Request, row),)) for row in covering(MATRIX)]


def count_nodes() -> int:
    """Number of different pairs of nodes."""
    return len(_LAYOUTS) * math.prod(len(PARAMETERS[name]) for name in _FREE)


def requests_of(nodes: Nodes) -> Iterator[Request]:
    """All requests between two nodes."""
    requests = {name.name: PARAMETERS[name.name] for name in fields(Request)}
    fixed = {"block_p": (nodes.block_p,), "block_d": (nodes.block_d,)}
    for row in Space(fixed | requests, MATRIX.rules).rows():
        yield _pick(Request, row)


def share_of_all(share: int, shares: int) -> Iterator[Trial]:
    """One of several equal shares of the whole product, with node pairs from all over it; shares count from 1."""
    count = count_nodes()
    for place in range(share - 1, count, shares):
        nodes = _nodes(spread(place, count))
        yield Trial(nodes, tuple(requests_of(nodes)))


def spread(place: int, count: int) -> int:
    """A permutation of that many places that moves neighbours far apart."""
    # Without a divisor in common with the count it meets all places before it comes back.
    stride = next(number for number in range(int(count * 0.618), 2 * count) if math.gcd(number, count) == 1)
    return place * stride % count


_LAYOUTS = tuple(Space({name: PARAMETERS[name] for name in ("kind", "layout_p", "layout_d")}, MATRIX.rules).rows())
_FREE = tuple(name.name for name in fields(Nodes) if name.name not in _LAYOUTS[0])


def _nodes(index: int) -> Nodes:
    index, place = divmod(index, len(_LAYOUTS))
    row = dict(_LAYOUTS[place])
    for name in _FREE:
        index, place = divmod(index, len(PARAMETERS[name]))
        row[name] = PARAMETERS[name][place]
    return Nodes(**row)


def _pick(kind: Any, row: Row) -> Any:
    return kind(**{field.name: row[field.name] for field in fields(kind)})


# ---- the planted bytes

# Memory without planted rows has other bytes, different at every place.
UNTOUCHED_P, UNTOUCHED_D = 1 << 60, 2 << 60


def planted(spec: KVCacheSpec, num_tokens: int, *, salt: int) -> Bytes:
    """[L, K, T, H, bytes of a row] of a whole model: of eight bytes of a row, no two rows of any salts have the same.

    A token's bytes do not depend on the number of tokens, nor on blocks, layouts and ranks.
    """
    words = -(-spec.head_dim * spec.itemsize // 8)
    shape = (spec.num_layers, spec.kv_factor, LONGEST, spec.num_kv_heads, words)
    numbers = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)[:, :, :num_tokens]
    mixed = _mixed(np.ascontiguousarray(numbers) + np.uint64(salt << 32))
    return mixed.view(np.uint8)[..., : spec.head_dim * spec.itemsize]


def untouched(num_bytes: int, *, salt: int) -> Bytes:
    """The memory's contents before."""
    return _mixed(np.arange(-(-num_bytes // 8), dtype=np.uint64) + np.uint64(salt)).view(np.uint8)[:num_bytes]


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scrambles bits so that different words stay different (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def heads_of_rank(rank: int, *, ranks: int, heads: int) -> tuple[int, ...]:
    """The model's heads in one rank's cache: an equal share in order, or a share that neighbours hold too."""
    each = np.repeat(np.arange(heads), max(1, ranks // heads)).reshape(ranks, -1)
    return tuple(int(head) for head in each[rank])
