"""The passes of the layer that drafts tokens as CUDA graphs, after captured decode steps. `draft_passes` says what a
pass is; these compute the same.

There are three graphs for each number of rows: the KV of the step's rows; their first drafts; and one pass over the
newest drafts, with the drafts after them. The last one is replayed for each further draft token. Everything that
depends on drawn tokens stays on the device: the tokens that a pass reads, which rows lead on, and where a row's blocks
end. So the host launches a few graphs, and copies nothing but the links of rows with drafts.

Legend: N most rows of a pass, R rows of a pass including padding, P pass of the layer, D hidden channel.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.host_to_device import to_device
from attention.metadata import AttentionMetadata, CommonAttentionMetadata
from baton.engine.device.capture import Progress, Recorder, affordable, thin
from baton.engine.device.decode_buffers import DecodeBuffers
from baton.engine.device.draft_leads import draft_links, find_leads, no_links
from baton.engine.device.draft_passes import DraftsOnHost, fetch_drafts
from baton.engine.device.graphs import DecodeGraphs, GraphSettings, capture_sizes
from baton.engine.device.unfolded import Unfolded
from baton.engine.sampling.choice import choose_tokens
from baton.engine.speculation.layer_drafting import MOST_LAYER_DRAFTS
from baton.kvcache.cache import PagedKVCache
from baton.models.layers.causal_lm import CausalLM

_log = logging.getLogger(__name__)

# Most rows of captured passes. Where more requests decode, drafts hardly ever pay.
_MOST_ROWS = 256
_NONE = -1

# Queues work over the rows in the buffers.
Work = Callable[[], None]


class Passes(NamedTuple):
    """The passes of one size.

    Attributes:
        write: writes the layer's KV of the step's rows, and leaves their hidden states.
        first: drafts the token after each row's drawn one.
        further: one pass over the newest drafts, and the drafts after them.
    """

    write: Work
    first: Work
    further: Work


@dataclass(frozen=True)
class DraftBuffers:
    """What the passes after one step leave to each other.

    Attributes:
        hidden: [N, D], of the newest pass.
        positions: [N] int64, of the newest pass.
        seq_lens: [N] int32, what the rows of the newest pass see.
        slots: [N] int64, where the newest pass writes; -1: nowhere.
        output_index: [N] int64, of the next draft token.
        newest: [N] int32, the newest drafts; -1: none.
        leads: [N] bool, as `find_leads` returns them.
        links: [3, N] int64, as `draft_links` returns them.
        pass_index: [1] int64, the row of `drafts` that the newest pass wrote.
        drafts: [P, N] int32, all drafts after the step.
    """

    hidden: Tensor
    positions: Tensor
    seq_lens: Tensor
    slots: Tensor
    output_index: Tensor
    newest: Tensor
    leads: Tensor
    links: Tensor
    pass_index: Tensor
    drafts: Tensor

    def common(
        self, decodes: DecodeBuffers, size: int, *, captured_length: int | None = None
    ) -> CommonAttentionMetadata:
        """Metadata of a further pass over this many rows. It has views, so it stays valid.

        Args:
            captured_length: of all rows, as the host knows it while a graph is captured; None: the host reads the
                lengths, on a CPU.
        """
        seq_lens = self.seq_lens[:size]
        on_host = seq_lens
        if captured_length is not None:
            on_host = torch.full((size,), captured_length, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=decodes.query_start_loc[: size + 1],
            query_start_loc_cpu=torch.arange(size + 1, dtype=torch.int32),
            seq_lens=seq_lens,
            seq_lens_cpu=on_host,
            num_computed_tokens_cpu=on_host,
            num_reqs=size,
            num_actual_tokens=size,
            max_query_len=1,
            block_table_tensor=decodes.block_table[:size],
            slot_mapping=self.slots[:size],
        )


def new_draft_buffers(decodes: DecodeBuffers) -> DraftBuffers:
    """Buffers for the passes after steps in these buffers."""
    assert decodes.hidden is not None, "the model has a layer that drafts"
    zeros = torch.zeros_like(decodes.positions[:_MOST_ROWS])
    words = torch.zeros_like(zeros, dtype=torch.int32)
    return DraftBuffers(
        hidden=torch.zeros_like(decodes.hidden[:_MOST_ROWS]),
        positions=zeros,
        seq_lens=words,
        slots=torch.full_like(zeros, _NONE),
        output_index=zeros.clone(),
        newest=words.clone(),
        leads=torch.ones_like(zeros, dtype=torch.bool),
        links=torch.from_numpy(no_links(len(zeros))).to(zeros.device),
        pass_index=zeros.new_zeros(1),
        drafts=words.new_zeros(MOST_LAYER_DRAFTS, len(zeros)),
    )


class DraftGraphs:
    """Captured passes, for one thread and one stream. On a CPU nothing is captured; the same padded passes run.

    Args:
        decodes: the captured decode steps, whose buffers have the rows.

    Attributes:
        sizes: captured numbers of rows, smallest first.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        cache: PagedKVCache,
        settings: GraphSettings,
        decodes: DecodeGraphs,
    ) -> None:
        self._model = model
        self._backend = backend if model.eagle is None else model.eagle.backend
        self._cache = cache
        self._settings = settings
        self._graphs = decodes
        self._decodes = decodes.buffers
        self._device = cache.view.device
        self._block_size = cache.shape.block_size
        self._buffers = new_draft_buffers(decodes.buffers)
        self._is_linked = False  # rows of the last step
        self.sizes: list[int] = []
        self._passes: dict[int, Passes] = {}

    def size_for(self, num_rows: int) -> int | None:
        """The captured size for so many rows. Returns None if their passes must run outside of graphs."""
        place = bisect_left(self.sizes, num_rows)
        return None if place == len(self.sizes) else self.sizes[place]

    def write_kv(self, size: int) -> None:
        """Queues the layer's pass over the rows of a step, which is queued in the decode steps' buffers."""
        self._passes[size].write()

    def draft(self, num_rows: int, size: int, unfolded: Unfolded | None, count: int) -> DraftsOnHost:
        """Queues the drafts after each sampled row of the step, after `write_kv`, and their copy to the host.

        Args:
            unfolded: how rows with drafts were computed; None: there are none.
            count: most drafts after each row, at least one.
        """
        assert 0 < count <= MOST_LAYER_DRAFTS
        if count > 1:
            self._link(num_rows, unfolded)
        host = self._decodes.host
        room = int((host.fields["num_slots"][:num_rows] - host.fields["seq_lens"][:num_rows]).max())
        count = min(count, 1 + room)
        passes = self._passes[size]
        passes.first()
        for _ in range(1, count):
            passes.further()
        unsampled = host.sampling.unsampled
        sampled = {row: row for row in range(num_rows) if row not in unsampled}
        return fetch_drafts(self._buffers.drafts[:count], sampled)

    def _link(self, num_rows: int, unfolded: Unfolded | None) -> None:
        """Brings the links of the step's rows to the device, if they differ from those of the step before."""
        links = None
        if unfolded is not None:
            rows = {place: place for place in range(num_rows)}
            links = draft_links(unfolded, rows, len(self._buffers.positions))
        if links is None and not self._is_linked:
            return
        self._is_linked = links is not None
        (copied,) = to_device((no_links(len(self._buffers.positions)) if links is None else links,), self._device)
        self._buffers.links.copy_(copied)

    def capture(self, progress: Progress | None = None, *, recorder: Recorder | None = None) -> None:
        """Captures the sizes that memory allows, after the decode steps, largest first. It writes to the cache.

        Args:
            recorder: owns the memory pool of all graphs; None: these graphs get their own.
        """
        wanted = capture_sizes(min(self._settings.most_rows, _MOST_ROWS))
        builder = self._backend.builder
        if self._device.type != "cuda":
            self._passes = {size: self._uncaptured(size) for size in wanted}
            self.sizes = wanted
        elif not self._graphs.sizes or not (self._backend.capabilities.cudagraph and builder.plans_on_device):
            _log.info("the passes of the layer that drafts run outside of graphs")
        else:
            self._capture_on_gpu(wanted, recorder or Recorder(self._device), progress)

    def _capture_on_gpu(self, wanted: list[int], recorder: Recorder, progress: Progress | None) -> None:
        start_s, first = time.perf_counter(), len(recorder.taken)
        sizes = wanted
        while sizes := thin(sizes, self._affordable(recorder, first) // len(Passes._fields)):
            *sizes, size = sizes
            self._passes[size] = self._captured(size, recorder)
            if progress is not None:
                progress(len(self._passes), len(self._passes) + len(sizes))
        self.sizes = sorted(self._passes)
        _log.info(
            "captured passes of the layer that drafts over %s rows in %.1f s, %.0f MiB",
            ", ".join(map(str, self.sizes)),
            time.perf_counter() - start_s,
            sum(recorder.taken[first:]) / (1 << 20),
        )

    def _affordable(self, recorder: Recorder, first: int) -> int:
        """How many more graphs memory allows, the same number on all ranks, after those from `first` on."""
        count = affordable(recorder.taken, self._settings.memory_bytes, first=first)
        return self._model.parallel.smallest(count, self._device)

    def _uncaptured(self, size: int) -> Passes:
        builder, of_step = self._backend.builder, self._decodes.common(size)
        further = self._buffers.common(self._decodes, size)
        return Passes(
            lambda: self._write(size, lambda: builder.build(0, of_step)),
            lambda: self._first(size),
            lambda: self._further(size, lambda: builder.build(0, further)),
        )

    def _captured(self, size: int, recorder: Recorder) -> Passes:
        build, of_step = self._backend.builder.build_for_cudagraph_capture, self._decodes.common(size)
        longest = self._settings.max_context_tokens
        further = self._buffers.common(self._decodes, size, captured_length=longest)
        self._graphs.fill_for_capture(size)
        return Passes(
            recorder.record_work(lambda: self._write(size, lambda: build(of_step))),
            recorder.record_work(lambda: self._first(size)),
            recorder.record_work(lambda: self._further(size, lambda: build(further))),
        )

    # ---- what graphs capture: nothing here reads a value on the host

    def _write(self, size: int, build: Callable[[], AttentionMetadata]) -> None:
        decodes = self._decodes
        assert decodes.hidden is not None
        metadata = build()
        # NOTE: kernels of torch must follow the plan, see `decode_step`.
        known_R = decodes.next_tokens[:size]
        next_ids_R = torch.where(known_R >= 0, known_R, decodes.sampled[:size]).clamp_(min=0).to(torch.int64)
        self._compute(size, next_ids_R, decodes.hidden[:size], decodes.positions[:size], metadata)

    def _first(self, size: int) -> None:
        buffers, decodes = self._buffers, self._decodes
        buffers.positions[:size].copy_(decodes.positions[:size])
        buffers.output_index[:size].copy_(decodes.sampling.output_index_R[:size])
        buffers.leads[:size].copy_(find_leads(decodes.sampled[:size], buffers.links[:, :size]))
        buffers.pass_index.zero_()
        self._draw(size)

    def _further(self, size: int, build: Callable[[], AttentionMetadata]) -> None:
        buffers, decodes = self._buffers, self._decodes
        positions_R, num_slots_R = buffers.positions[:size].add_(1), decodes.num_slots[:size]
        goes_on_R = (positions_R < num_slots_R) & buffers.leads[:size] & (decodes.slot_mapping[:size] >= 0)
        goes_on_R &= decodes.next_tokens[:size] < 0  # a row whose next token is known is followed by its own KV
        # The others see the first token of their sequence, and padding sees nothing.
        buffers.seq_lens[:size].copy_(torch.where(goes_on_R, positions_R + 1, num_slots_R.clamp(max=1)))
        at_R = positions_R.masked_fill(~goes_on_R, 0)
        blocks_R = decodes.block_table[:size].gather(1, (at_R // self._block_size)[:, None])[:, 0]
        slots_R = blocks_R.to(torch.int64) * self._block_size + at_R % self._block_size
        buffers.slots[:size].copy_(slots_R.masked_fill_(~goes_on_R, _NONE))
        metadata = build()
        next_ids_R = buffers.newest[:size].clamp(min=0).to(torch.int64)
        self._compute(size, next_ids_R, buffers.hidden[:size], at_R, metadata)
        buffers.pass_index.add_(1)
        self._draw(size, goes_on_R)

    def _compute(
        self, size: int, next_ids_R: Tensor, states_RD: Tensor, positions_R: Tensor, metadata: AttentionMetadata
    ) -> None:
        drafted_RD = self._model.compute_drafts(next_ids_R, states_RD, positions_R, self._cache, metadata)
        self._buffers.hidden[:size].copy_(drafted_RD)

    def _draw(self, size: int, goes_on_R: Tensor | None = None) -> None:
        """Drafts with the random numbers by which the model's tokens in these places will be drawn, like
        `DraftPasses`."""
        buffers = self._buffers
        buffers.output_index[:size].add_(1)
        newest_R = buffers.newest[:size]
        sampling = self._decodes.sampling._replace(output_index_R=buffers.output_index)
        choose_tokens(self._model.compute_draft_logits(buffers.hidden[:size]), sampling, out_R=newest_R)
        if goes_on_R is not None:
            newest_R.masked_fill_(~goes_on_R, _NONE)
        buffers.drafts[:, :size].index_copy_(0, buffers.pass_index, newest_R[None])
