"""Runs the layer that drafts tokens after each step: keeps its KV complete, and guesses tokens where the batch asks for
guesses.

After captured decode steps its passes are captured too (`draft_graphs`). After steps with prompts, steps outside of
graphs, and with attention data parallelism they are queued one by one (`draft_passes`). The device computes the step
meanwhile.
"""

from torch import Tensor

from attention.backend import AttentionBackend
from baton.engine.batch import Batch
from baton.engine.device.capture import Progress, Recorder
from baton.engine.device.draft_graphs import DraftGraphs
from baton.engine.device.draft_passes import DraftPasses, GuessesOnHost, StepDraws
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
    ) -> GuessesOnHost | None:
        """Queues the passes after a step, and stops the step's timers. Returns the guesses that the batch asks for.

        Args:
            states_TD: what `CausalLM.draft_states` returned, with this rank's tokens of the step first.
            unfolded: how rows with drafts were computed; None: there are none.
            drawing: has drawn the step's tokens.
            launch: how the step was launched, as in `ModelRunner.launches`.
        """
        num_rows = len(batch.shared_rows)
        if self._graphs is not None and launch == "decode_graph" and (size := self._graphs.size_for(num_rows)):
            self.captured += 1
            self._graphs.write_kv(size)
            slot.timer.stop()
            if not batch.guesses:
                return None
            slot.guess_timer.start()
            guesses = self._graphs.guess(num_rows, size, unfolded, batch.guesses)
        else:
            rows = batch.rows
            sampled = [place for place, row in enumerate(rows) if row.sample is not None]
            is_eager = launch == "eager"
            tokens, places = (drawing.drawn_S, range(len(sampled))) if is_eager else (drawing.tokens_N, sampled)
            draws = StepDraws(rows, tokens, places, unfolded)
            drafted_SD = self._passes.write_kv(draws, states_TD)
            slot.timer.stop()
            if not batch.guesses or not sampled:
                return None
            slot.guess_timer.start()
            guesses = self._passes.guess(draws, drafted_SD, batch.guesses)
        slot.guess_timer.stop()
        return guesses
