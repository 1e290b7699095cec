"""One step on the device: a batch of plain integers in, plain sampled tokens out.

Owns model, cache and backend, and the way from rows to tensors. Knows no queues, and of requests only their rows.

A step is queued (`launch`) and later waited for (`LaunchedStep.wait`), so that the next one can be queued behind it;
the tokens of the last one stay on the device for that. Suffixes: T token of the step, S row that is sampled, D hidden
channel, V vocabulary, N most rows of a step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.backend import AttentionBackend
from attention.cache import PagedKVCache
from attention.staging import to_device
from baton.errors import InternalError
from baton.types import SamplingParams, TokenOutput
from engine.batch import Batch, BatchRow, SampleRow
from engine.graphs import DecodeGraphs, GraphSettings
from engine.inputs import pending_tokens, stage_step
from engine.request import ModelFacts, int_array
from engine.sampler import needs_eager_sampling, sample
from models.causal_lm import CausalLM

_FIRST_ROWS = 64


class TokensOnHost(Protocol):
    """On their way; `outputs` is for when the device is done."""

    def outputs(self) -> list[TokenOutput]: ...


class LaunchedStep:
    """A step that is queued on the device."""

    def __init__(self, num_rows: int, parts: "Sequence[_Part]", timer: "_Timer") -> None:
        self._num_rows = num_rows
        self._parts = parts
        self._timer = timer

    def wait(self) -> list[TokenOutput | None]:
        """One entry per row, None where nothing was sampled. Any one thread, once; raises what the device raised."""
        self._timer.wait()
        results: list[TokenOutput | None] = [None] * self._num_rows
        for indices, tokens in self._parts:
            for index, token in zip(indices, tokens.outputs(), strict=True):
                results[index] = token
        return results

    @property
    def seconds(self) -> float:
        """What the step took on the device; known after `wait`."""
        return self._timer.seconds


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
        self._is_prepared = False
        # What the last step has sampled, row by row.
        self._tokens_N = (
            torch.zeros(_FIRST_ROWS, dtype=torch.int32, device=self._device)
            if self._graphs is None
            else self._graphs.buffers.sampled
        )

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
    def launch(self, batch: Batch) -> LaunchedStep:
        """Queues a step that computes the batch's tokens and writes their KV; on a GPU waits for nothing of it."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        timer = _Timer(self._device)
        size = None if self._graphs is None else self._graphs.size_for(batch.rows)
        if self._graphs is None or size is None:
            parts = self._launch_eagerly(batch.rows)
        else:
            parts = self._launch_padded(self._graphs, batch.rows, size)
        timer.stop()
        return LaunchedStep(len(batch.rows), parts, timer)

    def _launch_padded(self, graphs: DecodeGraphs, rows: Sequence[BatchRow], size: int) -> "list[_Part]":
        logits_RV = graphs.launch(rows, size)
        plain, eager = _split(rows)
        parts: list[_Part] = []
        if eager:
            (eager_S,) = to_device((np.array(eager, np.int64),), self._device)
            asking = [rows[index] for index in eager]
            pending_S = pending_tokens(asking, graphs.buffers.token_ids.index_select(0, eager_S))
            drawn = sample(logits_RV.index_select(0, eager_S), _samples(asking), pending_R=pending_S)
            self._tokens_N.index_copy_(0, eager_S, drawn.chosen_R)
            parts.append((eager, drawn.to_host()))
        if plain:
            parts.append((list(plain), _PlainTokens(plain, _to_host(self._tokens_N[: len(rows)]))))
        return parts

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


class _Timer:
    """From here to `stop`, as the device runs it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._start_s = self._stop_s = time.perf_counter()
        if device.type == "cuda":
            # A blocking event: the thread that waits leaves the processor to others.
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
            self._events[0].record()

    def stop(self) -> None:
        if self._events is None:
            self._stop_s = time.perf_counter()
        else:
            self._events[1].record()

    def wait(self) -> None:
        if self._events is not None:
            # NOTE: a thread that has no GPU yet gets the first one, and a context there takes half a gigabyte.
            torch.cuda.set_device(self._device)
            self._events[1].synchronize()

    @property
    def seconds(self) -> float:
        if self._events is None:
            return self._stop_s - self._start_s
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return milliseconds / 1e3


@dataclass(frozen=True)
class _PlainTokens:
    """Args:
    rows: and how each is sampled.
    words: int32, of all rows of the step.
    """

    rows: dict[int, SampleRow]
    words: Tensor

    def outputs(self) -> list[TokenOutput]:
        token_ids: list[int] = self.words.tolist()
        return [TokenOutput(token_ids[index], row.output_index) for index, row in self.rows.items()]


def _split(rows: Sequence[BatchRow]) -> tuple[dict[int, SampleRow], list[int]]:
    """The rows that are sampled: those for which a graph does that, and the others."""
    samples = {index: row.sample for index, row in enumerate(rows) if row.sample is not None}
    if not needs_eager_sampling(list(samples.values())):
        return samples, []
    eager = [index for index, how in samples.items() if needs_eager_sampling((how,))]
    for index in eager:
        del samples[index]
    return samples, eager


def _samples(rows: Sequence[BatchRow]) -> list[SampleRow]:
    return [row.sample for row in rows if row.sample is not None]


def _to_host(words: Tensor) -> Tensor:
    """A copy that the current stream makes; the host does not wait."""
    if words.device.type == "cpu":
        return words.clone()
    return torch.empty_like(words, device="cpu", pin_memory=True).copy_(words, non_blocking=True)


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
