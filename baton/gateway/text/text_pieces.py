"""Tokenizes texts in pieces, cut at special tokens, and caches the pieces' token ids.

So a conversation with one more turn costs only the encoding of that turn. The result always equals the tokenizer's own:
texts are cut only where the tokenizer does not look across, and not at all if it might.
"""

import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from threading import Lock
from typing import TypeAlias

from tokenizers import AddedToken, Tokenizer

# About four million tokens of English.
CACHE_BYTES = 64 << 20
_ENTRY_BYTES = 250  # overhead of a dictionary entry, its key and its array

_POINTER_BYTES = 8

# Most different first characters of special tokens for which each is searched separately.
_GROUPS_MAX = 3

_PROBES = ("a", "Some text, 1 more.")


_Ids: TypeAlias = tuple[int, ...]


class PieceEncoder:
    """Encodes texts with one tokenizer and a cache. Threads may share it.

    The time of a request reveals whether a piece was cached. So only texts with the same salt share cached pieces.
    """

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._frame = _frame(tokenizer)
        self._cuts = _cuts(tokenizer)
        self._cache = _PieceCache(cache_bytes)
        self._numbers = list(range(1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)))

    def encode(self, text: str, *, add_special_tokens: bool, salt: str) -> list[int]:
        """Returns what `tokenizer.encode(text)` returns. Releases the interpreter lock while it encodes new pieces."""
        if self._frame is None:
            return self._encode([text], add_special_tokens=add_special_tokens)[0]
        pieces = [text] if self._cuts is None else self._cuts.cut(text)
        found = self._cache.find(salt, pieces)
        missing = list(dict.fromkeys(piece for piece, ids in zip(pieces, found, strict=True) if ids is None))
        new: dict[str, _Ids] = {}
        if missing:
            encoded = self._encode(missing, add_special_tokens=False)
            # All cached ids share one object per number, so that each costs only a pointer.
            numbers = self._numbers
            new = {
                piece: tuple([numbers[number] for number in ids]) for piece, ids in zip(missing, encoded, strict=True)
            }
            self._cache.add(salt, new)
        token_ids = list(self._frame.before) if add_special_tokens else []
        for piece, ids in zip(pieces, found, strict=True):
            token_ids.extend(new[piece] if ids is None else ids)
        if add_special_tokens:
            token_ids.extend(self._frame.after)
        return token_ids

    @property
    def held_bytes(self) -> int:
        """Estimated memory of the cached pieces, in bytes."""
        return self._cache.held_bytes

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        # NOTE: the library releases the interpreter lock only in calls for a batch, not for a single text.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]


class _PieceCache:
    """An LRU cache of pieces' token ids, limited in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self._ids: OrderedDict[tuple[str, str], _Ids] = OrderedDict()
        self._lock = Lock()

    def find(self, salt: str, pieces: Sequence[str]) -> list[_Ids | None]:
        found: list[_Ids | None] = []
        with self._lock:
            for piece in pieces:
                key = (salt, piece)
                ids = self._ids.get(key)
                if ids is not None:
                    self._ids.move_to_end(key)
                found.append(ids)
        return found

    def add(self, salt: str, new: dict[str, _Ids]) -> None:
        with self._lock:
            for piece, ids in new.items():
                key = (salt, piece)
                size = _size(key, ids)
                # A piece that would evict many others is not cached.
                if key not in self._ids and size <= self._limit_bytes // 4:
                    self._ids[key] = ids
                    self.held_bytes += size
            while self.held_bytes > self._limit_bytes:
                self.held_bytes -= _size(*self._ids.popitem(last=False))


def _size(key: tuple[str, str], ids: _Ids) -> int:
    return _ENTRY_BYTES + sys.getsizeof(key[1]) + len(key[0]) + _POINTER_BYTES * len(ids)


# ---- places where a text may be cut


class _Cuts:
    """Finds special tokens as the library does: from left to right, and the longest one at each place.

    Args:
        contents: all tokens that the library searches for.
        here: the tokens before which a text may be cut.
    """

    def __init__(self, contents: Sequence[str], *, here: frozenset[str]) -> None:
        self._here = here
        self._all = re.compile(_pattern(contents))
        # A search for one first character is several times as fast as a search for any of several.
        firsts = sorted({content[0] for content in contents})
        groups = [[content for content in contents if content[0] == first] for first in firsts]
        self._groups = [re.compile(_pattern(group)) for group in groups] if len(groups) <= _GROUPS_MAX else [self._all]

    def cut(self, text: str) -> list[str]:
        """Cuts the text into pieces that begin with a special token, except perhaps the first piece."""
        here = self._here
        starts = [match.start() for match in self._find(text) if match[0] in here]
        if not starts:
            return [text]
        if starts[0]:
            starts.insert(0, 0)
        stops = [*starts[1:], len(text)]
        return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def _find(self, text: str) -> Iterable[re.Match[str]]:
        if len(self._groups) == 1:
            return self._groups[0].finditer(text)
        matches = sorted((match for group in self._groups for match in group.finditer(text)), key=re.Match.start)
        # If tokens overlap, only one search for all of them finds those that the library finds.
        overlap = any(first.end() > second.start() for first, second in pairwise(matches))
        return self._all.finditer(text) if overlap else matches


def _pattern(contents: Iterable[str]) -> str:
    """Returns a regular expression for the longest of these texts at a place, which reads each character once."""
    followers: dict[str, list[str]] = {}
    for content in contents:
        if content:
            followers.setdefault(content[0], []).append(content[1:])
    branches = []
    for first, rests in followers.items():
        shared = _shared(rests)
        rests = [rest[len(shared) :] for rest in rests]
        rest = _pattern(rests)
        ends = "?" if "" in rests and rest else ""
        branches.append(re.escape(first + shared) + rest + ends)
    return f"(?:{'|'.join(branches)})" if branches else ""


def _shared(texts: list[str]) -> str:
    """Returns the common prefix of the texts."""
    least, most = min(texts), max(texts)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(least, most, strict=False))
    return "".join(first for first, _ in same)


def _cuts(tokenizer: Tokenizer) -> _Cuts | None:
    """Returns where texts may be cut, or None if they may not be cut.

    The library first finds tokens that are not normalized in the raw text. Then it normalizes, splits and encodes each
    stretch between them separately. The very beginning of a text may be encoded differently, so each piece but the
    first keeps the special token before it. Texts are not cut at tokens whose match depends on the text before them.
    """
    tokens: list[AddedToken] = list(tokenizer.get_added_tokens_decoder().values())
    raw = [token for token in tokens if not token.normalized and token.content]
    is_random = bool(getattr(tokenizer.model, "dropout", None))
    needs_neighbours = any(token.single_word for token in raw)
    if not raw or is_random or needs_neighbours or tokenizer.encode_special_tokens:
        return None
    here = [token.content for token in raw if token.special and not token.lstrip and not token.content[0].isspace()]
    return _Cuts([token.content for token in raw], here=frozenset(here)) if here else None


# ---- tokens that the tokenizer adds around a text


@dataclass(frozen=True)
class _Frame:
    """The token ids that `add_special_tokens` adds around any text."""

    before: list[int]
    after: list[int]


def _frame(tokenizer: Tokenizer) -> _Frame | None:
    """Returns the token ids that are added around any text. Returns None if they depend on the text."""
    around: list[int] = tokenizer.encode("").ids
    for size in range(len(around) + 1):
        before, after = around[:size], around[size:]
        if all(
            tokenizer.encode(text).ids == [*before, *tokenizer.encode(text, add_special_tokens=False).ids, *after]
            for text in _PROBES
        ):
            return _Frame(before, after)
    return None
