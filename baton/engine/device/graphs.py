"""Decode steps as CUDA graphs: captured once for some numbers of rows, and replayed for any smaller number, padded.

Legend: R rows of a step including padding, V vocabulary.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata, CommonAttentionMetadata
from baton.engine.batch import BatchRow
from baton.engine.device.capture import Progress, Recorder, Step, affordable, thin
from baton.engine.device.cascade_steps import CascadeSteps, cascade_sizes
from baton.engine.device.decode_buffers import DecodeBuffers, new_decode_buffers
from baton.engine.device.owned_buffers import OwnedBuffers, new_owned_buffers
from baton.engine.device.step_slot import StepSlot, StepSlots
from baton.engine.request import int_array
from baton.engine.sampling.choice import choose_tokens
from baton.kvcache.cache import PagedKVCache
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.step_context import StepContext
from baton.models.layers.token_exchange import TokenShares

_log = logging.getLogger(__name__)

# Steps of more rows keep the GPU busy for longer than the host takes to launch them.
MOST_ROWS = 1024


class Steps(NamedTuple):
    """The step of one size, without and with adapters. `adapted` launches two more kernels per layer; without adapter
    slots both are the same step."""

    plain: Step
    adapted: Step


@dataclass(frozen=True)
class GraphSettings:
    """Settings of captured steps: what to capture, and how large the buffers are.

    Args:
        max_requests: most rows of a step; buffers are allocated for this many.
        max_context_tokens: longest sequence of a step.
        memory_bytes: most memory of graphs in addition to their buffers; None: no bound.
        largest: rows of the largest captured decode step, where `max_requests` are more.
        max_tokens: most tokens of a step; larger steps are not captured. 0: no step with prompts is.
        cascade: also capture steps that read the keys which many rows share once, if the backend can.
    """

    max_requests: int
    max_context_tokens: int
    memory_bytes: int | None = None
    largest: int = MOST_ROWS
    max_tokens: int = 0
    cascade: bool = False

    @property
    def most_rows(self) -> int:
        """Rows of the largest captured decode step."""
        return min(self.max_requests, self.largest)


def capture_sizes(largest: int) -> list[int]:
    """Numbers of rows to capture, smallest first. From 17 rows on at most a third of a step is padding, from 64 on at
    most a fifth."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 512, 64)]
    sizes += range(512, largest, 128)
    return [*(size for size in sizes if size < largest), largest]


def owned_decode_step(
    model: CausalLM, cache: PagedKVCache, owned: OwnedBuffers, metadata: AttentionMetadata, size: int
) -> Tensor:
    """`decode_step` with attention data parallelism: `size` rows on each rank. Returns all rows' logits."""
    buffers, num_rows = owned.rows, owned.num_rows(size)
    token_ids_R = buffers.look_tokens_up(num_rows)
    token_ids_A = token_ids_R.index_select(0, owned.rows_A[: size * owned.parallel.size])
    shares = TokenShares.equal(size, owned.parallel.size)
    context = StepContext(metadata, slots_T=owned.slot_mapping[:size], shares=shares)
    hidden_AD = model.compute(token_ids_A, owned.positions[:size], cache, context)
    if buffers.hidden is not None:
        assert model.exchange is not None
        buffers.hidden[:size].copy_(model.draft_states(model.exchange.own(hidden_AD)))
    logits_RV = model.compute_logits(hidden_AD.index_select(0, owned.places[:num_rows]))
    choose_tokens(logits_RV, buffers.sampling, out_R=buffers.sampled[:num_rows])
    return logits_RV


def decode_step(
    model: CausalLM,
    cache: PagedKVCache,
    buffers: DecodeBuffers,
    metadata: AttentionMetadata,
    size: int,
    *,
    adapters: bool = True,
) -> Tensor:
    """One step over the first `size` rows of the buffers: looks their tokens up, writes their KV, samples their next
    tokens. Returns logits [R, V]. Reads no memory of the host.

    Args:
        adapters: rows may have adapters.
    """
    rows = model.adapters_of(buffers.adapters[:size] if adapters else None)
    # NOTE: this must be a kernel of torch, which waits for all queued work. The layers' kernels read their attention
    # plan and the order of adapters before they wait, and these may have been queued just now.
    token_ids = buffers.look_tokens_up(size)
    states = None if cache.state is None else buffers.state_rows(size)
    context = StepContext(metadata, slots_T=buffers.slot_mapping[:size], adapters=rows, states=states)
    hidden_RD = model.compute(token_ids, buffers.positions[:size], cache, context)
    if buffers.hidden is not None:
        buffers.hidden[:size].copy_(model.draft_states(hidden_RD))
    logits_RV = model.compute_logits(hidden_RD)
    choose_tokens(logits_RV, buffers.sampling, out_R=buffers.sampled[:size])
    return logits_RV


class _Make(Protocol):
    def __call__(self, size: int, /, *, adapters: bool) -> Step: ...


class DecodeGraphs:
    """Captured decode steps, for one thread and one stream. On a CPU nothing is captured; the same padded step runs.

    Attributes:
        buffers: shared by all sizes.
        owned: this rank's part of the buffers, with attention data parallelism.
        sizes: captured numbers of rows, smallest first; with attention data parallelism, those of each rank.
        cascade: the steps that read shared keys once; None: there are none.
        shares_keys: whether the last step was one of these.
    """

    def __init__(
        self, model: CausalLM, backend: AttentionBackend, cache: PagedKVCache, settings: GraphSettings
    ) -> None:
        self._model = model
        self._backend = backend
        self._cache = cache
        self._settings = settings
        self._device = cache.view.device
        self.buffers = new_decode_buffers(
            max_rows=settings.max_requests,
            max_context_tokens=settings.max_context_tokens,
            block_size=cache.shape.block_size,
            device=self._device,
            hidden=(model.config.hidden_size, model.model.embed_tokens.weight.dtype) if model.drafts else None,
        )
        self.owned: OwnedBuffers | None = None
        if model.exchange is not None:
            self.owned = new_owned_buffers(self.buffers, model.exchange)
        self.sizes: list[int] = []
        self._steps: dict[int, Steps] = {}
        self.cascade: CascadeSteps | None = None
        self.shares_keys = False
        builder, block_size = backend.builder, cache.shape.block_size
        if settings.cascade and self.owned is None and (costs := builder.group_costs()) is not None:
            self.cascade = CascadeSteps(costs, builder, self.buffers, block_size=block_size)

    def size_for(self, rows: Sequence[BatchRow]) -> int | None:
        """The captured size for these rows. Returns None if they must run outside of a graph."""
        most = len(rows) if self.owned is None else max(Counter(row.owner for row in rows).values(), default=0)
        place = bisect_left(self.sizes, most)
        # Rows of a single token come first.
        if place == len(self.sizes) or len(rows[-1].token_ids) > 1:
            return None
        return self.sizes[place]

    def launch(self, rows: Sequence[BatchRow], size: int, *, step: int, slot: StepSlot) -> Tensor:
        """Queues a step that writes its tokens to `buffers.sampled`. Returns its logits, valid until the next step."""
        run = None if self.cascade is None else self.cascade.step_for(rows)
        self._fill(rows, size, step=step, slot=slot)
        self.shares_keys = run is not None
        if run is None:
            steps = self._steps[size]
            run = steps.adapted if self.buffers.host.has_adapters else steps.plain
        logits_RV = run()
        self.buffers.host.copied()
        return logits_RV

    def _fill(self, rows: Sequence[BatchRow], size: int, *, step: int, slot: StepSlot) -> None:
        self.buffers.fill(rows, step=step, slot=slot)
        if self.owned is not None:
            self.owned.fill(rows, size)

    def new_slots(self, *, prompt_input_bytes: int = 0) -> StepSlots:
        """Slots for steps in flight, captured or not."""
        return StepSlots(
            self._device,
            input_bytes=len(self.buffers.host.memory),
            max_rows=self.buffers.max_rows,
            prompt_input_bytes=prompt_input_bytes,
        )

    def capture(self, progress: Progress | None = None, *, recorder: Recorder | None = None) -> None:
        """Captures the sizes that memory allows, largest first, so that smaller ones reuse the memory of the largest.
        Writes no KV.

        Args:
            recorder: owns the memory pool of all graphs; None: these graphs get their own.
        """
        if self._device.type != "cuda":
            self._add(self._wanted, self._uncaptured, progress)
        elif self._backend.capabilities.cudagraph:
            self._capture_on_gpu(recorder or Recorder(self._device), progress)
        else:
            _log.warning("%s has no CUDA graphs: decode steps run without them", self._backend.capabilities.name)

    def capture_cascade(self, recorder: Recorder | None) -> None:
        """Captures the steps that read shared keys once, as many as the other graphs leave memory for. Writes no KV.

        Args:
            recorder: of the other graphs; None on a CPU.
        """
        if self.cascade is None:
            return
        # All ranks must choose the same steps.
        if not self._model.parallel.agree(repr(self.cascade.costs), self._device):
            self.cascade = None
            _log.warning("keys that requests share are read for each of them: ranks differ in their GPUs or heads")
            return
        sizes, start_s = cascade_sizes(self.sizes), time.perf_counter()
        taken = [] if recorder is None else recorder.taken
        first = len(taken)
        while sizes := thin(sizes, self._num_affordable(taken, first=first)):
            *sizes, size = sizes
            self.cascade.add(size, self._cascade_step(size, recorder))
        if recorder is not None:
            _log.info(
                "captured %d decode steps with a shared prefix in %.1f s, %.0f MiB",
                len(taken) - first,
                time.perf_counter() - start_s,
                sum(taken[first:]) / (1 << 20),
            )

    def _cascade_step(self, size: int, recorder: Recorder | None) -> Step:
        assert self.cascade is not None
        build = partial(self.cascade.build, self._common(size))
        run = partial(self._run, size, build, adapters=self._model.find_adapters is not None)
        if recorder is None:
            return run
        self.fill_for_capture(size)
        return recorder.record(run)

    def _num_affordable(self, taken: Sequence[int], *, first: int = 0) -> int:
        """How many more graphs memory allows. Ranks sum over the rows of a graph, so all of them capture the same
        sizes."""
        return self._model.parallel.smallest(affordable(taken, self._settings.memory_bytes, first=first), self._device)

    @property
    def _wanted(self) -> list[int]:
        largest = self._settings.most_rows
        if self.owned is not None:  # owners have about equally many rows
            largest = min(largest, -(-2 * self._settings.max_requests // self.owned.parallel.size))
        return capture_sizes(largest)

    def _capture_on_gpu(self, recorder: Recorder, progress: Progress | None) -> None:
        start_s = time.perf_counter()
        sizes = self._wanted
        self._add(sizes, partial(self._captured, recorder=recorder), progress, recorder.taken)
        _log.info(
            "captured decode steps of %s rows in %.1f s, %.0f MiB",
            ", ".join(map(str, self.sizes)),
            time.perf_counter() - start_s,
            sum(recorder.taken) / (1 << 20),
        )
        if len(self.sizes) < len(sizes):
            _log.warning(
                "%d of %d sizes are not captured, because graphs may take %.0f MiB: their batches get more padding",
                len(sizes) - len(self.sizes),
                len(sizes),
                (self._settings.memory_bytes or 0) / (1 << 20),
            )

    def _add(
        self,
        sizes: Sequence[int],
        make: _Make,
        progress: Progress | None,
        taken: Sequence[int] = (),
    ) -> None:
        has_adapters = self._model.find_adapters is not None
        while sizes:
            *sizes, size = sizes
            # First the one that takes more memory, which the other shares.
            adapted = make(size, adapters=has_adapters)
            self._steps[size] = Steps(make(size, adapters=False) if has_adapters else adapted, adapted)
            self.sizes = sorted(self._steps)
            count = self._num_affordable(taken)
            sizes = thin(sizes, count // 2 if has_adapters else count)
            if progress is not None:
                progress(len(self.sizes), len(self.sizes) + len(sizes))

    def _common(self, size: int) -> CommonAttentionMetadata:
        return self.buffers.common(size) if self.owned is None else self.owned.common(size)

    def _uncaptured(self, size: int, *, adapters: bool) -> Step:
        builder, common = self._backend.builder, self._common(size)
        return lambda: self._run(size, lambda: builder.build(0, common), adapters=adapters)

    def _captured(self, size: int, *, adapters: bool, recorder: Recorder) -> Step:
        builder, common = self._backend.builder, self._common(size)
        self.fill_for_capture(size)
        if builder.plans_on_device:
            build = partial(builder.build_for_cudagraph_capture, common)
            return recorder.record(lambda: self._run(size, build, adapters=adapters))
        metadata = builder.build_for_cudagraph_capture(common)
        assert builder.can_run_in_cudagraph(common), "the metadata was built for a graph"
        replay = recorder.record(lambda: self._run(size, lambda: metadata, adapters=adapters))

        def planned() -> Tensor:
            self._begin(size)  # the graph repeats this, but the plan may read the table before
            builder.build(0, common)  # writes to the memory that the graph reads
            return replay()

        return planned

    def _run(self, size: int, build: Callable[[], AttentionMetadata], *, adapters: bool) -> Tensor:
        self._begin(size)
        if self.owned is None:
            return decode_step(self._model, self._cache, self.buffers, build(), size, adapters=adapters)
        return owned_decode_step(self._model, self._cache, self.owned, build(), size)

    def _begin(self, size: int) -> None:
        """Makes the tables of the step complete."""
        self.buffers.place_new_blocks()
        if self.owned is not None:
            self.owned.take_own(size)

    def fill_for_capture(self, size: int) -> None:
        """Fills the buffers with one row of the longest sequence, by which some backends plan, and short rows, which
        run fast. None of them writes KV or a state."""
        longest = self._settings.max_context_tokens
        block_ids = int_array([0] * -(-longest // self._cache.shape.block_size))
        row = BatchRow("", int_array([0]), 0, block_ids, None)
        rows = [row._replace(token_start=longest - 1), *[row] * (size - 1)]
        if self.owned is not None:
            rows = [each._replace(owner=self.owned.parallel.rank) for each in rows]
        self._fill(rows, size, step=0, slot=self.new_slots().take())
        self.buffers.slot_mapping.fill_(-1)
