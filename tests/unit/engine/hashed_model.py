"""A model on the host for tests of the scheduler: its KV is a digest of all tokens so far, kept in blocks, and its next
token follows from that digest. A step that reads KV of other tokens than its request has raises, and so does one that
continues a recurrent state of other tokens."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from baton.core.types import TokenOutput
from baton.engine.batch import Batch, BatchRow, RowResult


class HashedModel:
    """Runs batches in launch order, like a runner.

    Args:
        num_tokens: draws are below this number, so a small one makes texts repeat.
    """

    def __init__(self, block_size: int, *, num_tokens: int) -> None:
        self._block_size = block_size
        self._num_tokens = num_tokens
        self._kv: dict[tuple[int, int, int], bytes] = {}  # by owner, block and offset
        self._states: dict[int, bytes] = {}  # by slot
        self._last: list[int] = []  # tokens that the last step drew, by row

    def continued(self, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens that follow these ones."""
        digest, drawn = b"", list[int]()
        for token in tokens:
            digest = _next(digest, token)
        for _ in range(count):
            drawn.append(self._draw(digest))
            digest = _next(digest, drawn[-1])
        return drawn

    def run(self, batch: Batch, sequences: Mapping[str, Sequence[int]]) -> list[RowResult]:
        """One step.

        Args:
            sequences: all known tokens of the requests, by id. The KV that a row reads must be theirs.
        """
        before, self._last = self._last, []
        self._copy(batch.restores)
        results = [self._row(row, before, sequences.get(row.request_id)) for row in batch.rows]
        for result in results:
            self._last.append(result.token_id if isinstance(result, TokenOutput) else -1)
        self._copy(batch.copies)
        return results

    def _row(self, row: BatchRow, before: list[int], known: Sequence[int] | None) -> RowResult:
        tokens = list(row.token_ids)
        if row.token_source is not None:
            assert before[row.token_source] >= 0, "the step before has drawn no token for this row"
            tokens = [before[row.token_source]]
        digest = b"" if row.token_start == 0 else self._kv[self._slot(row, row.token_start - 1)]
        if known is not None:
            expected = b""
            for token in known[: row.token_start]:
                expected = _next(expected, token)
            assert digest == expected, f"{row.request_id} reads KV of other tokens"
        if row.state_slot >= 0 and row.token_start:
            assert self._states[row.state_slot] == digest, f"{row.request_id} continues a state of other tokens"
        assert len(row.draft_slots) == (row.num_drafts if row.state_slot >= 0 else 0)
        drawn: list[TokenOutput] = []
        kept = True
        first_draw = len(tokens) - 1 - row.num_drafts
        for place, token in enumerate(tokens):
            digest = self._kv[self._slot(row, row.token_start + place)] = _next(digest, token)
            draft = place - first_draw
            self._states[row.draft_slots[draft - 1] if row.draft_slots and draft > 0 else row.state_slot] = digest
            for count, slot in row.snapshots:
                if count == place + 1:
                    self._states[slot] = digest
            if row.sample is not None and place >= first_draw and kept:
                index = row.sample.output_index + place - first_draw
                drawn.append(TokenOutput(self._draw(digest), index))
                kept = place + 1 < len(tokens) and drawn[-1].token_id == tokens[place + 1]
        if row.num_drafts:
            return tuple(drawn)
        return drawn[0] if drawn else None

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._states |= {target: self._states.get(source, b"") for source, target in pairs}

    def _slot(self, row: BatchRow, position: int) -> tuple[int, int, int]:
        return row.owner, row.block_ids[position // self._block_size], position % self._block_size

    def _draw(self, digest: bytes) -> int:
        return int.from_bytes(digest[:4], "little") % self._num_tokens


def _next(digest: bytes, token: int) -> bytes:
    return blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()
