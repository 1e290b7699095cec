"""Steps with prompts as CUDA graphs: captured for some numbers of tokens, and replayed for fewer, padded.

A step is a body, by its tokens, which leaves hidden states, and a head, by its rows, which samples their last tokens.
So few graphs serve every mix of decodes and prompts. With attention data parallelism, each rank's tokens are padded to
the size. Legend: R rows including padding, T tokens including padding, D hidden channel, V vocabulary.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from baton.engine.batch import BatchRow
from baton.engine.device.capture import Progress, Recorder, Step, affordable, fitting, thin
from baton.engine.device.decode_buffers import DecodeBuffers
from baton.engine.device.graphs import GraphSettings, capture_sizes
from baton.engine.device.layer_marks import LayerMarks
from baton.engine.device.owned_buffers import OwnedBuffers
from baton.engine.device.prompt_buffers import FilledRows, PromptBuffers, most_prompts, new_prompt_buffers
from baton.engine.device.step_slot import StepSlot
from baton.engine.sampling.choice import choose_tokens
from baton.kvcache.cache import PagedKVCache
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.step_context import StepContext
from baton.models.layers.token_exchange import TokenShares

_log = logging.getLogger(__name__)

# Steps of more tokens keep the GPU busy for twice as long as the host takes to launch them.
MOST_TOKENS = 4096

# The same for each rank's tokens, with attention data parallelism. Half of DeepSeek-V3 on four H200s took 57 ms instead
# of 87 for 256 tokens of one rank, but 116 instead of 87 for 1,024, because the other ranks are padded.
MOST_TOKENS_OF_RANK = 256

# Above this size, a captured step with more than half padding takes longer than a step outside of graphs.
_CHEAP_TOKENS = 512

# Queues the body of a step over the tokens in the buffers.
Body = Callable[[], None]


def token_sizes(largest: int) -> list[int]:
    """Numbers of tokens to capture, smallest first. Up to about 256 tokens a step takes as long as reading the weights;
    larger products take as long as the next multiple of 128."""
    sizes = [16, 32, 64, 96, 128, 192, 256, *range(320, 512, 64), *range(512, 2048, 128), *range(2048, largest, 256)]
    return [*(size for size in sizes if size < largest), largest]


class PromptGraphs:
    """Captured steps of any mix of decodes and prompts, for one thread and one stream. On a CPU nothing is captured;
    the same padded step runs.

    Args:
        rows_in_order: `ModelFacts.rows_in_order`.

    Attributes:
        buffers: shared by all sizes.
        draft_states: [T, D], where a step leaves the states that the layer that drafts tokens reads; None: there is no
            such layer.
        sizes: captured numbers of tokens, smallest first.
        head_sizes: captured numbers of rows to sample, smallest first.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        cache: PagedKVCache,
        settings: GraphSettings,
        *,
        decodes: DecodeBuffers,
        owned: OwnedBuffers | None,
        marks: LayerMarks,
        rows_in_order: bool = False,
    ) -> None:
        self._model = model
        self._rows_in_order = rows_in_order
        self._backend = backend
        self._cache = cache
        self._settings = settings
        self._marks = marks
        self._device = cache.view.device
        most_tokens = MOST_TOKENS if owned is None else MOST_TOKENS_OF_RANK
        self.buffers: PromptBuffers = new_prompt_buffers(
            decodes,
            owned,
            max_tokens=min(settings.max_tokens, most_tokens),
            max_requests=settings.max_requests,
            max_context_tokens=settings.max_context_tokens,
            block_size=cache.shape.block_size,
            hidden_size=model.config.hidden_size,
            dtype=model.model.embed_tokens.weight.dtype,
        )
        hidden = self.buffers.hidden
        self.draft_states = torch.zeros_like(hidden[: self.buffers.max_tokens]) if model.drafts else None
        self._with_context = backend.builder.captures_context or self._device.type != "cuda"
        self.sizes: list[int] = []
        self.head_sizes: list[int] = []
        self._bodies: dict[int, Body] = {}
        self._heads: dict[int, Step] = {}
        self._filled = FilledRows(0, 0, ())

    def size_for(self, rows: Sequence[BatchRow]) -> int | None:
        """The captured size for these rows. Returns None if they must run outside of a graph."""
        if len(rows) > self._settings.max_requests:
            return None
        if not self._with_context and any(row.token_start and len(row.token_ids) > 1 for row in rows):
            return None
        ranks = self.buffers.ranks
        tokens, prompts = [0] * ranks, [0] * ranks
        for row in rows:
            owner = row.owner if ranks > 1 else 0
            tokens[owner] += len(row.token_ids)
            prompts[owner] += len(row.token_ids) > 1
        place = bisect_left(self.sizes, max(tokens))
        while place < len(self.sizes) and most_prompts(self.sizes[place]) < max(prompts):
            place += 1
        if place == len(self.sizes):
            return None
        # Whole experts of other ranks compute no padding.
        is_cheap = ranks > 1 and self._model.expert_counts is not None
        if not is_cheap and self.sizes[place] * ranks > max(_CHEAP_TOKENS, 2 * sum(tokens)):
            return None
        return self.sizes[place]

    @property
    def starts(self) -> Sequence[int]:
        """Place of each row's first token among `buffers.hidden`, of the last step."""
        return self._filled.starts

    def launch(self, rows: Sequence[BatchRow], size: int, *, step: int, slot: StepSlot) -> Tensor | None:
        """Queues a step that writes its tokens to the decodes' `sampled`, and its hidden states to `buffers.hidden`.
        Returns the logits of its rows, valid until the next step; None if no row is sampled."""
        self._filled = self.buffers.fill(rows, size, step=step, slot=slot)
        self._bodies[size]()
        host = self.buffers.decodes.host
        host.copied()
        if len(host.sampling.unsampled) == len(rows):
            return None
        place = bisect_left(self.head_sizes, len(rows))
        if place == len(self.head_sizes):
            return self._sample(len(rows))
        return self._heads[self.head_sizes[place]]()

    def capture(self, progress: Progress | None = None, *, recorder: Recorder | None = None) -> None:
        """Captures the sizes that memory allows, largest first, so that smaller ones reuse the memory of the largest.
        Writes no KV.

        Args:
            recorder: owns the memory pool of all graphs; None: these graphs get their own.
        """
        if self._device.type != "cuda":
            self._bodies = {size: self._uncaptured(size) for size in self._wanted}
            self.sizes = sorted(self._bodies)
        elif self._backend.builder.captures_prompts:
            self._capture_on_gpu(recorder or Recorder(self._device), progress)
        else:
            _log.info("%s has no CUDA graphs of prompts: their steps run without them", self._backend.capabilities.name)

    @property
    def limits(self) -> tuple[int, int]:
        """Most rows and tokens of a step."""
        return self._settings.max_requests, self._settings.max_tokens

    def drop(self) -> None:
        """Lets no step run captured any more."""
        self.sizes, self._bodies = [], {}

    @property
    def _wanted(self) -> list[int]:
        return token_sizes(self.buffers.max_tokens)

    def _capture_on_gpu(self, recorder: Recorder, progress: Progress | None) -> None:
        start_s = time.perf_counter()
        first = len(recorder.taken)
        self._fill_for_capture()
        heads = thin(capture_sizes(self._settings.most_rows), self._affordable(recorder, first))
        for size in reversed(heads):
            self._heads[size] = recorder.record(lambda size=size: self._sample(size))  # type: ignore[misc]
        self.head_sizes = heads
        first_body = len(recorder.taken)
        bodies = thin(self._fitting(recorder, first), self._affordable(recorder, first_body))
        while bodies:
            *bodies, size = bodies
            self._bodies[size] = self._captured(size, recorder)
            bodies = thin(bodies, self._affordable(recorder, first_body))
            if progress is not None:
                progress(len(self._bodies), len(self._bodies) + len(bodies))
        self.sizes = sorted(self._bodies)
        _log.info(
            "captured steps of %s tokens with prompts in %.1f s, %.0f MiB",
            ", ".join(map(str, self.sizes)),
            time.perf_counter() - start_s,
            sum(recorder.taken[first:]) / (1 << 20),
        )
        if missing := len(self._wanted) - len(self.sizes):
            _log.warning(
                "%d of %d sizes of steps with prompts are not captured, because graphs may take %.0f MiB",
                missing,
                len(self._wanted),
                (self._settings.memory_bytes or 0) / (1 << 20),
            )

    def _fitting(self, recorder: Recorder, first: int) -> list[int]:
        """The wanted sizes without those that would take the memory of the others, the same on all ranks."""
        room = self._settings.memory_bytes
        if room is not None:
            room = self._model.parallel.smallest(max(0, room - sum(recorder.taken[first:])), self._device)

        def needs(size: int) -> int:
            self.buffers.pad_all(size)
            batch = self.buffers.padded(size)
            found = recorder.needs(lambda: self._run(size, lambda: self._backend.builder.build_padded(batch)))
            return -self._model.parallel.smallest(-found, self._device)

        return fitting(self._wanted, needs, room, least=_CHEAP_TOKENS)

    def _affordable(self, recorder: Recorder, first: int) -> int:
        """How many more graphs memory allows, the same number on all ranks, after those from `first` on."""
        count = affordable(recorder.taken, self._settings.memory_bytes, first=first)
        return self._model.parallel.smallest(count, self._device)

    def _uncaptured(self, size: int) -> Body:
        builder, buffers = self._backend.builder, self.buffers

        def build() -> AttentionMetadata:
            return builder.build(0, buffers.common(self._filled.num_decodes, self._filled.num_prompts, size))

        return lambda: self._run(size, build)

    def _captured(self, size: int, recorder: Recorder) -> Body:
        builder, batch = self._backend.builder, self.buffers.padded(size)
        self.buffers.pad_all(size)
        parts = recorder.record_parts(lambda: self._run(size, lambda: builder.build_padded(batch)), self._marks.cutting)

        def replay() -> None:
            for graph, layer_stop in parts:
                graph.replay()
                if layer_stop is not None:
                    self._marks.passed(layer_stop)

        return replay

    def _run(self, size: int, build: Callable[[], AttentionMetadata]) -> None:
        """Everything but the head. On a GPU it reads no memory of the host."""
        buffers, exchange = self.buffers, self._model.exchange
        buffers.begin(size)
        metadata = build()
        adapters = self._model.adapters_of(buffers.adapters[:size])
        # NOTE: this must be a kernel of torch, for the reason given in `decode_step`.
        token_ids_T = buffers.look_tokens_up(size)
        states = None if self._cache.state is None else buffers.state_rows(size, in_order=self._rows_in_order)
        context = StepContext(
            metadata,
            slots_T=buffers.slot_mapping[:size],
            adapters=adapters,
            states=states,
            shares=None if exchange is None else TokenShares.equal(size, buffers.ranks),
        )
        hidden_TD = self._model.compute(token_ids_T, buffers.positions[:size], self._cache, context)
        buffers.hidden[: len(hidden_TD)].copy_(hidden_TD)
        if self.draft_states is not None:
            own_TD = hidden_TD if exchange is None else exchange.own(hidden_TD)
            self.draft_states[:size].copy_(self._model.draft_states(own_TD))

    def _sample(self, size: int) -> Tensor:
        """The head: samples the rows' next tokens. Returns logits [R, V]."""
        buffers, decodes = self.buffers, self.buffers.decodes
        last_R = buffers.last[:size]
        torch.index_select(buffers.token_ids, 0, last_R, out=decodes.token_ids[:size])
        logits_RV = self._model.compute_logits(buffers.hidden.index_select(0, last_R))
        choose_tokens(logits_RV, decodes.sampling, out_R=decodes.sampled[:size])
        return logits_RV

    def _fill_for_capture(self) -> None:
        """Makes every decode padding."""
        decodes = self.buffers.decodes
        decodes.fill((), step=0, slot=StepSlot(self._device, input_bytes=len(decodes.host.memory), max_rows=0))
        decodes.host.copied()
