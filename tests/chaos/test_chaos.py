"""A storm over real processes, with a fixed seed: `make chaos` runs many. How long anything takes is not judged."""

from pathlib import Path

import pytest

from tests.chaos.history import line_of
from tests.chaos.run import run
from tests.chaos.scenario import draw
from tests.chaos.summary import round_of

SEED, SECONDS, EVERY_S = 2, 50.0, 1.25  # as many faults as in 80 s at the usual pace
_TAIL = 80


@pytest.mark.slow
@pytest.mark.timeout(1500)  # only what hangs takes that long: a run waits for states
async def test_faults_change_no_token_leave_nothing_and_end_no_request_without_a_typed_error(tmp_path: Path) -> None:
    outcome = await run(draw(SEED, seconds=SECONDS, every_s=EVERY_S), tmp_path)
    events = outcome.history.events
    assert not outcome.violations, "\n".join(
        [*map(line_of, events[-_TAIL:]), *map(str, outcome.violations), f"make chaos SEED={SEED}"]
    )
    counts = round_of(outcome.scenario, events, outcome.violations)
    assert counts.ends["finished"] > 0
    assert counts.answered_s  # after faults of these kinds
