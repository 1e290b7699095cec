"""The runner of a node with several ranks: sends every step to all of them, and returns rank 0's results."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from baton.core.types import PromptLogprob
from baton.engine.batch import Batch, LayerDrafts, RowResult
from baton.engine.device.launched_step import LaunchedStep
from baton.engine.device.layer_marks import OnMark
from baton.engine.device.runner import ModelRunner
from baton.engine.pooling import PooledRows
from baton.engine.request import ModelFacts
from baton.models.adapters.adapter import Adapter
from baton.models.layers.expert_counts import FetchedCounts
from baton.node.ranks.steps import StepWriter


class RankedRunner:
    """The part of `ModelRunner`'s interface that an engine uses, over all ranks.

    Args:
        runner: of rank 0.
        steps: writes to the other ranks.
        wait_prepared: returns when all other ranks have prepared their runners; raises EOFError if a rank has ended.
        on_failure: called on any thread when a step failed here. The other ranks may be in the middle of the step, so
            no further step can be computed, and the caller of `launch` or `wait` waits for the end of the process.
    """

    def __init__(
        self,
        runner: ModelRunner,
        steps: StepWriter,
        *,
        wait_prepared: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._runner = runner
        self._steps = steps
        self._wait_prepared = wait_prepared
        self._on_failure = on_failure

    @property
    def facts(self) -> ModelFacts:
        return self._runner.facts

    def prepare(self) -> None:
        """Prepares all ranks: a node that served before its last rank is ready would wait for it in the first step."""
        self._steps.prepare()
        self._runner.prepare()
        self._wait_prepared()

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        try:
            self._steps.load_adapter(slot, adapter)
            self._runner.load_adapter(slot, adapter)
        except Exception as error:  # noqa: BLE001  the ranks may have different adapters now
            self._fail(error)

    def fetch_expert_counts(self) -> FetchedCounts | None:
        """Rank 0's counts, because every rank counts the tokens of all ranks."""
        return self._runner.fetch_expert_counts()

    def launch(self, batch: Batch, on_mark: OnMark) -> "RankedStep":
        try:
            self._steps.launch(batch)
            return RankedStep(self._runner.launch(batch, on_mark), self._fail)
        except Exception as error:  # noqa: BLE001  after any error the ranks are out of step
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        self._on_failure(f"an engine step failed: {type(error).__name__}: {error}")
        threading.Event().wait()
        raise AssertionError("the event is never set")


class RankedStep:
    """A step that was launched on all ranks."""

    def __init__(self, step: LaunchedStep, fail: Callable[[Exception], NoReturn]) -> None:
        self._step = step
        self._fail = fail

    def wait(self) -> list[RowResult]:
        try:
            return self._step.wait()
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)

    @property
    def seconds(self) -> float:
        return self._step.seconds

    @property
    def scores(self) -> Mapping[int, Sequence[PromptLogprob]]:
        return self._step.scores

    @property
    def pools(self) -> PooledRows:
        return self._step.pools

    @property
    def layer_drafts(self) -> LayerDrafts | None:
        return self._step.layer_drafts

    @property
    def shares_keys(self) -> bool:
        return self._step.shares_keys
