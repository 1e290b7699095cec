"""Rows that several steps share: which requests share them, at which place, and that the host's arrays equal those of
rows made for each step."""

import numpy as np
import pytest

from baton.core.errors import InternalError
from baton.core.sampling import ResolvedSampling
from baton.engine.batch import Batch
from baton.engine.device.host_rows import HostRows
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import BLOCK_SIZE, EOS, finish, launch, make, request


def steady(scheduler: Scheduler, num_steps: int, *, token_id: int = 5) -> list[Batch]:
    """Steps, each launched while the previous one runs; the last is in flight."""
    batches = [launch(scheduler)]
    for _ in range(num_steps - 1):
        batches.append(launch(scheduler))
        finish(scheduler, batches[-2], token_id)
    return batches


def names(batch: Batch) -> list[str]:
    return [row.request_id for row in batch.rows]


def test_a_decode_has_one_row_for_all_steps_until_its_blocks_change() -> None:
    scheduler = make()
    scheduler.submit(request("a", 4), 0.0)
    batches = steady(scheduler, 2 + 2 * BLOCK_SIZE)
    shared = [batch.shared_rows[0] for batch in batches]
    assert len({id(row) for row in shared[1 : 1 + BLOCK_SIZE]}) == 1
    assert len({id(row) for row in shared[1 + BLOCK_SIZE : 1 + 2 * BLOCK_SIZE]}) == 1
    now = [batch.rows[0] for batch in batches]
    assert [row.token_start for row in now] == [0, *range(4, 5 + 2 * BLOCK_SIZE)]
    assert [row.sample and row.sample.output_index for row in now] == list(range(len(batches)))
    assert all(len(row.block_ids) == row.token_start // BLOCK_SIZE + 1 for row in now[1:])


@pytest.mark.parametrize(
    "sampling",
    [
        ResolvedSampling(max_tokens=50, temperature=0.0, repetition_penalty=1.1),
        ResolvedSampling(max_tokens=50, temperature=0.0, min_tokens=40),
    ],
)
def test_rows_that_differ_in_every_step_are_not_shared(sampling: ResolvedSampling) -> None:
    scheduler = make()
    scheduler.submit(request("a", 4, sampling=sampling), 0.0)
    assert all(batch.shared_rows[0].since is None for batch in steady(scheduler, 4))


def test_other_requests_keep_their_places_when_one_ends_and_a_newcomer_takes_the_free_place() -> None:
    scheduler = make()
    for name in "abcd":
        scheduler.submit(request(name, 3), 0.0)
    before = steady(scheduler, 4)[-1]
    scheduler.abort("b")
    without = launch(scheduler)
    finish(scheduler, before)
    scheduler.submit(request("e", 1), 0.0)
    launch(scheduler)
    finish(scheduler, without)
    after = launch(scheduler)
    assert (names(before), names(without)) == (["a", "b", "c", "d"], ["a", "d", "c"])
    assert names(after) == ["a", "d", "c", "e"]
    assert without.shared_rows[0] is before.shared_rows[0]
    assert without.shared_rows[2] is before.shared_rows[2]


def test_a_preempted_request_begins_with_a_new_row() -> None:
    """At the same place, after a prompt as long as its earlier sequence."""
    scheduler = make(num_blocks=4, tokens=32)
    for name in "ab":
        scheduler.submit(request(name, 3), 0.0)
    seen = []
    for _ in range(40):
        while (batch := scheduler.schedule(0.0)) is not None:
            seen.append(batch)
        if not scheduler.steps_in_flight:
            break
        finish(scheduler, next(each for each in seen if each.step == seen[-1].step - scheduler.steps_in_flight + 1))
    assert scheduler.load().preemptions > 0
    for batch in seen:
        for row in batch.rows:
            assert len(row.block_ids) == -(-row.token_stop // BLOCK_SIZE)


def arrays_of(host: HostRows, size: int) -> dict[str, list[int]]:
    fields = {name: values.tolist() for name, values in host.fields.items() if name not in ("token_ids", "top_k_R")}
    fields["num_computed"] = host.num_computed.tolist()
    fields["token_ids"] = [
        token
        for token, source in zip(host.fields["token_ids"].tolist(), fields["token_source"], strict=True)
        if source >= 64
    ][:size]
    return fields


def test_shared_rows_give_the_arrays_that_rows_of_a_step_alone_give() -> None:
    """Prompts and decodes arrive, grow, end and change places. Some steps run elsewhere, and some are refused."""
    scheduler = make(num_blocks=64, tokens=40, requests=12)
    shared, alone = (HostRows(64, max_blocks=32, table_width=32, block_size=BLOCK_SIZE) for _ in range(2))
    draw = np.random.default_rng(0)
    in_flight: list[Batch] = []
    kept = 0
    for number in range(150):
        if draw.random() < 0.3 and scheduler.load().requests_running < 12:
            sampling = ResolvedSampling(max_tokens=int(draw.integers(2, 30)), temperature=0.5, seed=number)
            scheduler.submit(request(f"r{number}", int(draw.integers(1, 12)), sampling=sampling), 0.0)
        batch = scheduler.schedule(0.0)
        if batch is not None:
            in_flight.append(batch)
        if batch is not None and draw.random() < 0.9:
            size = sum(len(row.token_ids) == 1 for row in batch.rows)
            for host, rows in ((shared, batch.shared_rows), (alone, batch.rows)):
                host.take(rows[:size], step=batch.step, prompts=rows[size:])
                host.copied()
            kept += sum(row.since not in (None, batch.step) for row in batch.shared_rows)
            assert arrays_of(shared, len(batch.rows)) == arrays_of(alone, len(batch.rows))
            assert shared.sampling.unsampled == alone.sampling.unsampled
            with pytest.raises(InternalError, match="blocks"):
                shared.take([*batch.rows, batch.rows[0]._replace(block_ids=batch.rows[0].block_ids * 99)], step=0)
        if in_flight and (batch is None or len(in_flight) == 2):
            finish(scheduler, in_flight.pop(0), int(draw.choice([5, 5, 5, 5, 5, 5, 5, EOS])))
    assert kept > 50
