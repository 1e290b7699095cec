"""Runs requests on a runner without scheduler and event loop: a test chooses the requests of each step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.batch import Batch, BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.launched_step import LaunchedStep
from baton.engine.device.runner import ModelRunner
from baton.engine.request import IntArray, int_array
from baton.engine.sampling.row import SampleRows
from baton.kvcache.cache import PagedKVCache


def runner_of(built: BuiltRunner, *, graphs: GraphSettings | None) -> ModelRunner:
    """A runner with its own cache, full of NaN so that reading an unwritten slot shows."""
    cache = PagedKVCache(built.cache.spec, built.cache.shape, built.cache.view.device)
    for part in cache.blockwise:
        part.storage.fill_(float("nan"))
    return ModelRunner(
        built.runner.model, built.runner.backend, cache, built.runner.facts, graphs=graphs, grammars=built.grammars
    )


@dataclass
class _Sequence:
    name: str
    tokens: IntArray
    samples: SampleRows
    owner: int = 0
    adapter: int = -1
    computed: int = 0
    blocks: IntArray = field(default_factory=int_array)
    state_slot: int = -1
    draft_slots: tuple[int, ...] = ()
    source: int | None = None
    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def num_output(self) -> int:
        return len(self.outputs) + (self.source is not None)


class Driver:
    """Builds steps and collects their tokens.

    Args:
        ahead: each step is launched before the previous one is waited for.
        end_token_ids: forbidden until an output has its `min_tokens`.
        num_layer_drafts: how many tokens the model's own layer drafts after each step.

    Attributes:
        layer_drafts: the last drafts after each request's newest token.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        ahead: bool = False,
        end_token_ids: frozenset[int] = frozenset(),
        num_layer_drafts: int = 0,
    ) -> None:
        self.runner = runner
        self.layer_drafts: dict[str, tuple[int, ...]] = {}
        self._num_layer_drafts = num_layer_drafts
        self._ahead = ahead
        self._end_token_ids = end_token_ids
        self._sequences: dict[str, _Sequence] = {}
        # Every third block: no request owns the blocks between.
        self._free = list(range(runner.facts.num_blocks - 1, -1, -3))
        self._state_slots = list(range(runner.facts.state_slots))
        self._under_way: tuple[list[_Sequence], LaunchedStep] | None = None

    def add(self, name: str, prompt: Sequence[int], *, owner: int = 0, adapter: int = -1, **sampling: Any) -> None:
        params = ResolvedSampling(**{"max_tokens": 1000, "temperature": 0.0} | sampling)
        samples = SampleRows(params, prompt_tokens=len(prompt), end_token_ids=self._end_token_ids)
        slot = self._state_slots.pop() if self._state_slots else -1
        self._sequences[name] = _Sequence(
            name, int_array(tuple(prompt)), samples, owner=owner, adapter=adapter, state_slot=slot
        )

    def move(self, name: str) -> None:
        """Gives the request other blocks, so that its KV must be computed again."""
        self.finish()
        sequence = self._sequences[name]
        self._free = [*sequence.blocks, *self._free]
        sequence.blocks, sequence.computed = int_array(), 0

    def step(self, *names: str, chunk: int = 1000, drafts: Mapping[str, Sequence[int]] | None = None) -> None:
        """One step of these requests: of each the known tokens that are not computed, up to `chunk`, and the drafts of
        requests that decode."""
        given = drafts or {}
        chosen = sorted(
            map(self._sequences.__getitem__, names),
            key=lambda sequence: self._missing(sequence) + len(given.get(sequence.name, ())) > 1,
        )
        rows = tuple(self._row(sequence, chunk, given.get(sequence.name, ())) for sequence in chosen)
        launched = self.launch(Batch(0, rows, num_layer_drafts=self._num_layer_drafts))
        self._receive()
        for index, (sequence, row) in enumerate(zip(chosen, rows, strict=True)):
            sequence.computed = row.token_stop
            sequence.source = index if row.sample is not None else None
        self._under_way = chosen, launched
        if not self._ahead:
            self._receive()

    def launch(self, batch: Batch) -> LaunchedStep:
        return self.runner.launch(batch)

    def finish(self) -> None:
        self._receive()

    def outputs(self, name: str) -> list[TokenOutput]:
        self.finish()
        return self._sequences[name].outputs

    def ids(self, name: str) -> list[int]:
        return [token.token_id for token in self.outputs(name)]

    def _receive(self) -> None:
        if self._under_way is None:
            return
        chosen, launched = self._under_way
        self._under_way = None
        for sequence, result in zip(chosen, launched.wait(), strict=True):
            slots, sequence.draft_slots = (sequence.state_slot, *sequence.draft_slots), ()
            tokens = result if isinstance(result, tuple) else [] if result is None else [result]
            for token in tokens:
                assert isinstance(token, TokenOutput), token
                sequence.outputs.append(token)
                sequence.tokens.append(token.token_id)
            if isinstance(result, tuple):  # the KV of wrong drafts is written again
                sequence.computed = len(sequence.tokens) - 1
                sequence.state_slot = slots[min(len(result), len(slots)) - 1]
            self._state_slots = [*(slot for slot in slots if slot != sequence.state_slot >= 0), *self._state_slots]
            sequence.source = None
        if (layer_drafts := launched.layer_drafts) is not None:
            self.layer_drafts |= {chosen[place].name: tokens for place, tokens in layer_drafts.tokens.items()}

    def _missing(self, sequence: _Sequence) -> int:
        return len(sequence.tokens) - sequence.computed

    def _row(self, sequence: _Sequence, chunk: int, drafts: Sequence[int]) -> BatchRow:
        known = sequence.source is None
        num_tokens = min(chunk, self._missing(sequence)) if known else 1
        start, stop = sequence.computed, sequence.computed + num_tokens
        missing = -(-(stop + len(drafts)) // self.runner.facts.block_size) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks = sequence.blocks + int_array([self._free.pop() for _ in range(missing)])
        if sequence.state_slot >= 0:
            sequence.draft_slots = tuple(self._state_slots.pop() for _ in drafts)
        sampled = not known or stop == len(sequence.tokens)
        return BatchRow(
            sequence.name,
            sequence.tokens[start:stop] + int_array(tuple(drafts)) if known else int_array([0]),
            start,
            sequence.blocks,
            sequence.samples.row(sequence.num_output, sequence.tokens) if sampled else None,
            sequence.source,
            adapter=sequence.adapter,
            state_slot=sequence.state_slot,
            owner=sequence.owner,
            num_drafts=len(drafts),
            draft_slots=sequence.draft_slots,
            next_token=-1 if sampled else sequence.tokens[stop],
        )
