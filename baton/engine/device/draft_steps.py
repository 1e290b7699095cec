"""Runs the layer that drafts tokens after steps: it keeps the layer's KV complete where the batch asks for that, and
drafts tokens where the batch asks for drafts.

After captured decode steps its passes are captured too (`draft_graphs`). After steps with prompts, steps outside of
graphs, and with attention data parallelism they are queued one by one (`draft_passes`). The device computes the step
meanwhile.
"""

from torch import Tensor

from attention.backend import AttentionBackend
from baton.engine.batch import Batch
from baton.engine.device.capture import Progress, Recorder
from baton.engine.device.draft_graphs import DraftGraphs
from baton.engine.device.draft_passes import DraftPasses, DraftsOnHost, StepDraws
from baton.engine.device.drawing import TokenDrawing
from baton.engine.device.graphs import DecodeGraphs, GraphSettings
from baton.engine.device.step_slot import StepSlot
from baton.engine.device.unfolded import Unfolded
from baton.kvcache.cache import PagedKVCache
from baton.models.layers.causal_lm import CausalLM


class DraftSteps:
    """The passes after the steps of one runner, for the thread that launches its steps.

    Args:
        decodes: the captured decode steps, if there are any.

    Attributes:
        captured: number of steps so far whose passes were captured.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        cache: PagedKVCache,
        settings: GraphSettings | None,
        decodes: DecodeGraphs | None,
    ) -> None:
        self._passes = DraftPasses(model, backend, cache)
        self._graphs: DraftGraphs | None = None
        if settings is not None and decodes is not None and model.exchange is None:
            self._graphs = DraftGraphs(model, backend, cache, settings, decodes)
        self.captured = 0

    def capture(self, progress: Progress | None, recorder: Recorder | None) -> None:
        """Captures the passes, after the decode steps."""
        if self._graphs is not None:
            self._graphs.capture(progress, recorder=recorder)

    def launch(
        self,
        batch: Batch,
        states_TD: Tensor,
        slot: StepSlot,
        unfolded: Unfolded | None,
        drawing: TokenDrawing,
        *,
        launch: str,
    ) -> DraftsOnHost | None:
        """Queues the passes after a step, and stops the step's timers: `draft_timer` also times the pass over the
        step's tokens, except after steps with prompts. Returns the drafts that the batch asks for.

        Args:
            states_TD: what `CausalLM.draft_states` returned, with this rank's tokens of the step first.
            unfolded: how rows with drafts were computed; None: there are none.
            drawing: has drawn the step's tokens.
            launch: how the step was launched, as in `ModelRunner.launches`.
        """
        # A step with prompts computes the layer in any case, so that is a part of its time.
        has_prompts = len(batch.shared_rows[-1].token_ids) > 1
        if not has_prompts:
            slot.step_computed()
        drafts: DraftsOnHost | None = None
        if (size := self._captured_size(batch, launch)) is not None:
            assert self._graphs is not None
            assert not has_prompts, "it is a step of decodes"
            self.captured += 1
            self._graphs.write_kv(size)
            if batch.num_layer_drafts:
                drafts = self._graphs.draft(len(batch.shared_rows), size, unfolded, batch.num_layer_drafts)
        else:
            draws = _draws(batch, unfolded, drawing, is_eager=launch == "eager")
            drafted_SD = self._passes.write_kv(draws, states_TD)
            if has_prompts:
                slot.step_computed()
            if batch.num_layer_drafts and draws.sampled:
                drafts = self._passes.draft(draws, drafted_SD, batch.num_layer_drafts)
        slot.draft_timer.stop()
        return drafts

    def _captured_size(self, batch: Batch, launch: str) -> int | None:
        if self._graphs is None or launch != "decode_graph":
            return None
        return self._graphs.size_for(len(batch.shared_rows))


def _draws(batch: Batch, unfolded: Unfolded | None, drawing: TokenDrawing, *, is_eager: bool) -> StepDraws:
    rows = batch.rows
    sampled = [place for place, row in enumerate(rows) if row.sample is not None]
    if is_eager:
        return StepDraws(rows, drawing.drawn_S, range(len(sampled)), unfolded)
    return StepDraws(rows, drawing.tokens_N, sampled, unfolded)
