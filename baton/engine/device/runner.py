"""Runs steps on the device: a batch of plain integers in, plain sampled tokens out. Owns model, cache and backend.

A step is queued by `launch` and waited for by `LaunchedStep.wait`, so the next one can be queued meanwhile; it reads
the tokens of the last step on the device. Suffixes: T token of the step, S row that is sampled, L row that wants
logprobs, D hidden channel, V vocabulary, N most rows of a step.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from attention.backend import AttentionBackend
from baton.engine.batch import Batch, RowResult
from baton.engine.device.capture import Progress, Recorder
from baton.engine.device.draft_passes import DraftsOnHost
from baton.engine.device.draft_steps import DraftSteps
from baton.engine.device.drawing import TokenDrawing
from baton.engine.device.grammar_rows import GrammarRows
from baton.engine.device.graphs import DecodeGraphs, GraphSettings
from baton.engine.device.inputs import pending_tokens, stage_step
from baton.engine.device.launched_step import Drawn, LaunchedStep, ReadStates
from baton.engine.device.layer_marks import LayerMarks, OnMark, index_stops, kv_stops
from baton.engine.device.pooled_states import pool_states
from baton.engine.device.prompt_check import CheckedSteps, captured_steps_agree
from baton.engine.device.prompt_graphs import PromptGraphs
from baton.engine.device.step_slot import StepSlot, StepSlots
from baton.engine.device.unfolded import Unfolded, unfold, unfolds
from baton.engine.device.warm_up import warm_up
from baton.engine.request import ModelFacts
from baton.engine.sampling.prompt_scores import score_prompts
from baton.grammar.compiler import GrammarCompiler
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.states import copy_states
from baton.models.adapters.adapter import Adapter
from baton.models.adapters.bank import AdapterBank
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.expert_counts import FetchedCounts
from baton.models.layers.step_context import StepContext

_log = logging.getLogger(__name__)

_FIRST_ROWS = 64


class ModelRunner:
    """Runs batches on one device, in launch order. Not thread-safe: one thread calls `prepare`, then `launch`.

    Args:
        graphs: settings of CUDA graphs; None: no step runs as one. On a CPU decodes run padded in the graphs' buffers.
        grammars: compiles the grammars of rows.
        adapters: the slots for adapters; None: there are none.

    Attributes:
        launches: steps so far, warm-up included, by how they were launched: as a graph of decodes, one of prompts, or
            neither.
        drafts: the passes of the layer that drafts; None: the model has none.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        cache: PagedKVCache,
        facts: ModelFacts,
        *,
        graphs: GraphSettings | None = None,
        grammars: GrammarCompiler,
        adapters: AdapterBank | None = None,
    ) -> None:
        self.facts = facts
        self.adapters = adapters
        self.model = model
        self.backend = backend
        self._cache = cache
        self._device = cache.view.device
        self._marks = LayerMarks(
            model.model.layers,
            self._device,
            kv_stops=kv_stops(model.config, cache.spec),
            index_stops=index_stops(model.config),
        )
        self._graphs: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None
        if graphs is not None:
            self._graphs = DecodeGraphs(model, backend, cache, graphs)
            if graphs.max_tokens:
                self._prompts = PromptGraphs(
                    model,
                    backend,
                    cache,
                    graphs,
                    decodes=self._graphs.buffers,
                    owned=self._graphs.owned,
                    marks=self._marks,
                    rows_in_order=facts.rows_in_order,
                )
        self.drafts = DraftSteps(model, backend, cache, graphs, self._graphs) if model.drafts else None
        self.grammars = GrammarRows(grammars, self._device)
        self._is_prepared = False
        self._unfolded_before = False  # the last step
        self.launches = dict.fromkeys(("decode_graph", "prompt_graph", "eager"), 0)
        if self._graphs is None:
            sampled = torch.zeros(_FIRST_ROWS, dtype=torch.int32, device=self._device)
            self._slots = StepSlots(self._device, input_bytes=0, max_rows=0)
        else:
            sampled = self._graphs.buffers.sampled
            prompt_bytes = 0 if self._prompts is None else len(self._prompts.buffers.inputs)
            self._slots = self._graphs.new_slots(prompt_input_bytes=prompt_bytes)
        self._drawing = TokenDrawing(self.grammars, sampled, is_fixed=self._graphs is not None)

    @torch.inference_mode()
    def prepare(self, progress: Progress | None = None) -> None:
        """Compiles kernels and captures graphs, so that no request waits for them. Later calls do nothing. Call it on
        the thread that launches, while the cache is empty: it writes to the cache.

        Args:
            progress: called with the number of captured graphs and of all graphs.
        """
        if self._is_prepared:
            return
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            warm_up(self.run, self.facts, self._device, drafts=self.drafts is not None)
            self._capture(progress, Recorder(self._device))
            # Now in the buffers of the graphs.
            warm_up(self.run, self.facts, self._device, drafts=self.drafts is not None)
            self._check_prompts()
        else:
            self._capture(progress)
        self.reset_expert_counts()
        self._is_prepared = True

    def _capture(self, progress: Progress | None, recorder: Recorder | None = None) -> None:
        if self._graphs is not None:
            self._graphs.capture(progress, recorder=recorder)
        if self.drafts is not None:
            self.drafts.capture(progress, recorder)
        if self._prompts is not None:
            self._prompts.capture(progress, recorder=recorder)
        if self._graphs is not None:
            self._graphs.capture_cascade(recorder)

    def _check_prompts(self) -> None:
        """Drops captured steps with prompts that do not compute what steps outside of graphs do. All ranks do so
        together."""
        if (prompts := self._prompts) is None or not prompts.sizes:
            return
        rank = self.model.parallel.rank if self.facts.num_owners > 1 else 0
        steps = CheckedSteps(self.facts, rank, *prompts.limits)
        if not steps.fit:
            return

        def eager(batch: Batch) -> None:
            self._prompts = None
            self.run(batch)
            self._prompts = prompts

        agree = captured_steps_agree(self.run, eager, self._cache, steps)
        if not self.model.parallel.smallest(int(agree), self._device):
            _log.error(
                "captured steps with prompts write other KV than the same steps outside of graphs, so they are not "
                "used; please report it"
            )
            prompts.drop()

    @torch.inference_mode()
    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Fills a slot, which no later step uses for another adapter."""
        assert self.adapters is not None, "the engine has no slots then"
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.adapters.load(slot, adapter)

    def fetch_expert_counts(self) -> FetchedCounts | None:
        """Counts the tokens of each expert's places in the steps so far. The host does not wait.

        Returns:
            The counts, or None if the model has no experts or its ranks do not hold whole ones.
        """
        counts = self.model.expert_counts
        return None if counts is None else counts.fetch()

    def reset_expert_counts(self) -> None:
        """Resets the experts' token counts after warm-up steps."""
        if self.model.expert_counts is not None:
            self.model.expert_counts.reset()

    def run(self, batch: Batch) -> list[RowResult]:
        """Launches a step and waits for it."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch, on_mark: OnMark | None = None) -> LaunchedStep:
        """Queues a step that computes the batch's tokens and writes their KV. On a GPU the host does not wait for it.

        Args:
            on_mark: gets the marks that the batch asks for, on this thread, while the step is queued; on a CPU the
                layers are computed by then.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        slot = self._slots.take()
        slot.timer.start()
        if (unfolded := self._unfolded(batch)) is not None:
            batch = unfolded.batch
        num_rows = len(batch.shared_rows)
        read = ReadStates()
        marked: AbstractContextManager[None] = nullcontext()
        if self._cache.state is not None:
            copy_states(self._cache.state, batch.restores)
        if batch.layers_per_group and on_mark is not None:
            marked = self._marks.every(batch.layers_per_group, on_mark)
        if (size := self._size(self._graphs, batch)) is not None:
            launch = "decode_graph"
            drawn, states_TD = self._launch_decodes(batch, size, slot)
        elif (size := self._size(self._prompts, batch)) is not None:
            launch = "prompt_graph"
            with marked:
                drawn, read, states_TD = self._launch_prompts(batch, size, slot)
        else:
            launch = "eager"
            with marked:
                drawn, read, states_TD = self._launch_eagerly(batch, keeps_tokens=unfolded is None)
        if self._cache.state is not None:
            copy_states(self._cache.state, batch.copies)
        layer_drafts: DraftsOnHost | None = None
        if self.drafts is None or states_TD is None or not batch.writes_draft_kv:
            assert not batch.num_layer_drafts or self.drafts is None, "a step with drafts computes the layer"
            slot.timer.stop()
        else:
            layer_drafts = self.drafts.launch(batch, states_TD, slot, unfolded, self._drawing, launch=launch)
        self.launches[launch] += 1
        shares_keys = launch == "decode_graph" and self._graphs is not None and self._graphs.shares_keys
        return LaunchedStep(num_rows, drawn, slot, self._slots, read, unfolded, layer_drafts, shares_keys=shares_keys)

    def _unfolded(self, batch: Batch) -> Unfolded | None:
        """The batch with a row for each draft. Returns None if it has none."""
        rows = batch.shared_rows
        before, self._unfolded_before = self._unfolded_before, unfolds(rows)
        if before or (self._unfolded_before and any(row.num_drafts for row in rows)):
            sources = [row.request_id for row in rows if row.token_source is not None]
            assert not sources, f"with drafts, and after other rows, all tokens are known, but not those of {sources}"
        if not self._unfolded_before:
            return None
        return unfold(batch)

    @staticmethod
    def _size(graphs: "DecodeGraphs | PromptGraphs | None", batch: Batch) -> int | None:
        """The captured size for the batch. Returns None if these graphs cannot run it."""
        if graphs is None or (batch.reads_hidden_states and isinstance(graphs, DecodeGraphs)):
            return None
        return graphs.size_for(batch.shared_rows)

    def _launch_decodes(self, batch: Batch, size: int, slot: StepSlot) -> tuple[Drawn, Tensor | None]:
        """Returns what is drawn, and the states of this rank's rows for the layer that drafts, if there is one."""
        assert self._graphs is not None
        buffers = self._graphs.buffers
        logits_RV = self._graphs.launch(batch.shared_rows, size, step=batch.step, slot=slot)
        return self._drawing.draw_padded(buffers, logits_RV, batch, slot), buffers.hidden

    def _launch_prompts(self, batch: Batch, size: int, slot: StepSlot) -> tuple[Drawn, ReadStates, Tensor | None]:
        assert self._prompts is not None
        buffers = self._prompts.buffers
        logits_RV = self._prompts.launch(batch.shared_rows, size, step=batch.step, slot=slot)
        read = self._read_states(buffers.hidden[: size * buffers.ranks], self._prompts.starts, batch)
        if logits_RV is None:
            return self._drawing.draw_none(), read, self._prompts.draft_states
        drawn = self._drawing.draw_padded(buffers.decodes, logits_RV, batch, slot)
        return drawn, read, self._prompts.draft_states

    def _read_states(self, hidden_TD: Tensor, starts: Sequence[int], batch: Batch) -> ReadStates:
        """Queues what the step reads from hidden states besides tokens.

        Args:
            starts: places of the rows' first tokens.
        """
        if not batch.reads_hidden_states:
            return ReadStates()
        logits, scores, pools = self.model.compute_logits, batch.scores, batch.pools
        return ReadStates(
            score_prompts(logits, hidden_TD, starts, scores, vocab=self.facts.vocab_size) if scores else None,
            pool_states(self.model, hidden_TD, starts, pools) if pools else None,
        )

    def _launch_eagerly(self, batch: Batch, *, keeps_tokens: bool) -> tuple[Drawn, ReadStates, Tensor | None]:
        """Queues the step outside of graphs.

        Args:
            keeps_tokens: the next step may read the step's tokens on the device, so there must be room for them.
        """
        rows = batch.rows
        if keeps_tokens:
            self._drawing.make_room(rows)
        with_states = self._cache.state is not None
        exchange = self.model.exchange
        inputs = stage_step(
            rows,
            self._drawing.tokens_N,
            block_size=self.facts.block_size,
            with_states=with_states,
            rows_in_order=self.facts.rows_in_order,
            exchange=exchange,
        )
        adapters = self.model.adapters_of(inputs.adapters_T)
        context = StepContext(
            self.backend.builder.build(0, inputs.common),
            slots_T=inputs.common.slot_mapping,
            adapters=adapters,
            states=inputs.states,
            shares=inputs.shares,
        )
        hidden_TD = self.model.compute(inputs.token_ids_T, inputs.positions_T, self._cache, context)
        states_TD = None
        if self.drafts is not None:
            states_TD = self.model.draft_states(hidden_TD if exchange is None else exchange.own(hidden_TD))
        read = self._read_states(hidden_TD, inputs.starts, batch)
        if not inputs.sampled:
            return self._drawing.draw_none(), read, states_TD
        logits_SV = self.model.compute_logits(hidden_TD.index_select(0, inputs.last_S))
        sampled_rows = [rows[index] for index in inputs.sampled]
        pending_S = pending_tokens(sampled_rows, inputs.token_ids_T.index_select(0, inputs.last_S))
        places_S = inputs.sampled_S if keeps_tokens else None
        parts, failed = self._drawing.draw(inputs.sampled, sampled_rows, logits_SV, pending_S, places_S)
        return Drawn(None, parts, failed), read, states_TD
