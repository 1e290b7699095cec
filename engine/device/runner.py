"""One step on the device: a batch of plain integers in, plain sampled tokens out.

Owns model, cache and backend, and the way from rows to tensors. Knows no queues, and of requests only their rows.

A step is queued (`launch`) and later waited for (`LaunchedStep.wait`), so that the next one can be queued behind it;
the tokens of the last one stay on the device for that. Suffixes: T token of the step, S row that is sampled, D hidden
channel, V vocabulary, N most rows of a step.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from attention.backend import AttentionBackend
from attention.host_to_device import to_device
from baton.errors import InternalError
from baton.types import SamplingParams, TokenOutput
from engine.batch import Batch, BatchRow, SampleRow
from engine.device.graphs import DecodeGraphs, GraphSettings
from engine.device.inputs import pending_tokens, stage_step
from engine.device.layer_marks import LayerMarks, OnMark
from engine.device.step_slot import StepSlot, StepSlots
from engine.request import ModelFacts, int_array
from engine.sampling.sampler import sample, tell
from kvcache.cache import PagedKVCache
from models.causal_lm import CausalLM

_FIRST_ROWS = 64


class TokensOnHost(Protocol):
    """On their way; `outputs` is for when the device is done."""

    def outputs(self) -> list[TokenOutput]: ...


class LaunchedStep:
    """A step that is queued on the device.

    Args:
        plain: of all rows; those in `parts` have other tokens, or more to say of them.
        slot: the step's; it goes back to `slots` when the step is over.
    """

    def __init__(
        self, num_rows: int, plain: "_PlainTokens | None", parts: "Sequence[_Part]", slot: StepSlot, slots: StepSlots
    ) -> None:
        self._num_rows = num_rows
        self._plain = plain
        self._parts = parts
        self._slot = slot
        self._slots = slots
        self._seconds = 0.0

    def wait(self) -> list[TokenOutput | None]:
        """One entry per row, None where nothing was sampled. Any one thread, once; raises what the device raised."""
        self._seconds = self._slot.timer.wait()
        results: list[TokenOutput | None] = [None] * self._num_rows
        if self._plain is not None:
            results = self._plain.outputs(self._slot.tokens_host)
        self._slots.give_back(self._slot)
        for indices, tokens in self._parts:
            for index, token in zip(indices, tokens.outputs(), strict=True):
                results[index] = token
        return results

    @property
    def seconds(self) -> float:
        """What the step took on the device; known after `wait`."""
        return self._seconds


class ModelRunner:
    """Not thread-safe: one thread calls `prepare`, then `launch`, and steps run in the order of their launch.

    Args:
        graphs: None: no step runs as a CUDA graph. On a CPU decodes run padded, in the graphs' buffers.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        cache: PagedKVCache,
        facts: ModelFacts,
        *,
        graphs: GraphSettings | None = None,
    ) -> None:
        self.facts = facts
        self.model = model
        self.backend = backend
        self._cache = cache
        self._device = cache.view.device
        self._graphs = None if graphs is None else DecodeGraphs(model, backend, cache, graphs)
        self._marks = LayerMarks(model.model.layers, self._device)
        self._is_prepared = False
        # What the last step has sampled, row by row.
        if self._graphs is None:
            self._tokens_N = torch.zeros(_FIRST_ROWS, dtype=torch.int32, device=self._device)
            self._slots = StepSlots(self._device, input_bytes=0, max_rows=0)
        else:
            self._tokens_N = self._graphs.buffers.sampled
            self._slots = self._graphs.new_slots()

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles kernels and captures graphs, so that no request waits for that; the first call does. On the thread
        that will launch, before the cache holds anything: writes into it.

        Args:
            progress: called with the graphs captured and the graphs in all.
        """
        if self._is_prepared:
            return
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            for batch in _warm_up_batches(self.facts):
                self.run(batch)
        if self._graphs is not None:
            self._graphs.capture(progress)
        self._is_prepared = True

    def run(self, batch: Batch) -> list[TokenOutput | None]:
        """Launches a step and waits for it."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch, on_mark: OnMark | None = None) -> LaunchedStep:
        """Queues a step that computes the batch's tokens and writes their KV; on a GPU waits for nothing of it.

        Args:
            on_mark: gets the marks that the batch asks for, on this thread, as the step is queued; on a CPU thus as
                its layers are computed.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        slot = self._slots.take()
        slot.timer.start()
        num_rows = len(batch.shared_rows)
        size = None if self._graphs is None else self._graphs.size_for(batch.shared_rows)
        if self._graphs is None or size is None:
            marked: AbstractContextManager[None] = nullcontext()
            if batch.layers_per_group and on_mark is not None:
                marked = self._marks.every(batch.layers_per_group, on_mark)
            with marked:
                plain, parts = None, self._launch_eagerly(batch.rows)
        else:
            plain, parts = self._launch_padded(self._graphs, batch, size, slot)
        slot.timer.stop()
        return LaunchedStep(num_rows, plain, parts, slot, self._slots)

    def _launch_padded(
        self, graphs: DecodeGraphs, batch: Batch, size: int, slot: StepSlot
    ) -> "tuple[_PlainTokens | None, list[_Part]]":
        rows = batch.shared_rows
        logits_RV = graphs.launch(rows, size, step=batch.step, slot=slot)
        host, num_rows = graphs.buffers.host, len(rows)
        parts: list[_Part] = []
        if edited := sorted(host.kinds.edited):
            (edited_S,) = to_device((np.array(edited, np.int64),), self._device)
            asking = [rows[index].at(batch.step) for index in edited]
            pending_S = pending_tokens(asking, graphs.buffers.token_ids.index_select(0, edited_S))
            drawn = sample(logits_RV.index_select(0, edited_S), _samples(asking), pending_R=pending_S)
            self._tokens_N.index_copy_(0, edited_S, drawn.chosen_R)
            parts.append((edited, drawn.to_host()))
        # The host changes its own for the next step, maybe before this one is over.
        output_indices = host.fields["output_index_R"][:num_rows].copy()
        if told := sorted(host.kinds.told):
            logits_LV, chosen_L = logits_RV[:num_rows], self._tokens_N[:num_rows]
            if len(told) < num_rows:
                (told_L,) = to_device((np.array(told, np.int64),), self._device)
                logits_LV, chosen_L = logits_LV.index_select(0, told_L), chosen_L.index_select(0, told_L)
            counts = [how.params.logprobs or 0 for how in _samples([rows[index] for index in told])]
            drawn = tell(logits_LV, chosen_L, output_indices=output_indices[told].tolist(), counts=counts)
            parts.append((told, drawn.to_host()))
        plain = None
        if len(edited) + len(told) < num_rows:
            slot.fetch(self._tokens_N)
            plain = _PlainTokens(output_indices, frozenset(host.kinds.unsampled))
        return plain, parts

    def _launch_eagerly(self, rows: Sequence[BatchRow]) -> "list[_Part]":
        self._make_room(rows)
        inputs = stage_step(rows, self._tokens_N, block_size=self.facts.block_size)
        metadata = self.backend.builder.build(0, inputs.common)
        hidden_TD = self.model(inputs.token_ids_T, inputs.positions_T, self._cache, metadata)
        if not inputs.sampled:
            return []
        logits_SV = self.model.compute_logits(hidden_TD.index_select(0, inputs.last_S))
        asking = [rows[index] for index in inputs.sampled]
        pending_S = pending_tokens(asking, inputs.token_ids_T.index_select(0, inputs.last_S))
        drawn = sample(logits_SV, _samples(asking), pending_R=pending_S)
        self._tokens_N.index_copy_(0, inputs.sampled_S, drawn.chosen_R)
        return [(inputs.sampled, drawn.to_host())]

    def _make_room(self, rows: Sequence[BatchRow]) -> None:
        """For the step's tokens, and for those that it asks for, of which there are none where that step failed."""
        needed = max(len(rows), *(row.token_source + 1 for row in rows if row.token_source is not None), 0)
        if needed <= len(self._tokens_N):
            return
        if self._graphs is not None:
            raise InternalError(
                f"a step of {needed} rows",
                field="max_requests",
                value=needed,
                allowed=(f"at most {len(self._tokens_N)}",),
            )
        self._tokens_N = pad(self._tokens_N, (0, 2 * needed - len(self._tokens_N)))


# Rows of a step, and their tokens.
_Part: TypeAlias = tuple[list[int], TokensOnHost]


@dataclass(frozen=True)
class _PlainTokens:
    """Of all rows of a step.

    Args:
        output_indices: int64, as in `SampleRow`.
        unsampled: rows whose token counts for nothing.
    """

    output_indices: NDArray[np.int64]
    unsampled: frozenset[int]

    def outputs(self, tokens: NDArray[np.int32]) -> list[TokenOutput | None]:
        """One per row. Only after the tokens have come."""
        indices = self.output_indices.tolist()
        outputs: list[TokenOutput | None] = list(map(TokenOutput, tokens[: len(indices)].tolist(), indices))
        for row in self.unsampled:
            outputs[row] = None
        return outputs


def _samples(rows: Sequence[BatchRow]) -> list[SampleRow]:
    return [row.sample for row in rows if row.sample is not None]


def _warm_up_batches(facts: ModelFacts) -> list[Batch]:
    """A prompt without context and with some, which have kernels of their own; both alone and behind a decode, where
    what they read is aligned differently. Sampled in both ways."""
    length = min(2 * facts.block_size, facts.max_context_tokens, facts.num_blocks * facts.block_size) - 1
    blocks = int_array(list(range(-(-(length + 1) // facts.block_size))))
    drawn = SamplingParams(temperature=1.0, top_p=0.9, top_k=8, seed=0, logprobs=1)
    decode = BatchRow("", int_array([0]), 0, blocks, SampleRow(SamplingParams(temperature=0.0), 0, (), int_array(), 0))
    prompt = BatchRow("", int_array([0] * length), 0, blocks, SampleRow(drawn, 0, (), int_array(), 0))
    prompts = (prompt, prompt._replace(token_start=1))
    return [Batch(0, (*decodes, each)) for each in prompts for decodes in ((), (decode,))]
