"""The counts and the output of the attention benchmark; its measurements need a GPU."""

from pathlib import Path

import pytest
import torch

from bench.attention import gqa, mla, plot, sparse
from bench.attention.batches import Lengths, attend, checked_rows
from bench.attention.figures import Goal, Work, default_row, rows_of
from bench.attention.measure import TURN_BYTES, Ceilings, turns
from bench.attention.run import run
from bench.table import Row

MACHINE = Ceilings(copy_gigabytes_per_s=4000.0, matmul_teraflops=700.0)
US_OF = {"OURS": 100.0, "RIVAL": 90.0, "SLOW": 200.0}
READS = Work("decode", "B 1", num_bytes=3e8, num_flops=1e9)
COMPUTES = Work("prefill", "1 x 8", num_bytes=1e6, num_flops=5e10)


def test_without_a_gpu_it_reports_that_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    messages: list[str] = []
    assert list(run(messages.append)) == []
    assert messages == ["attention: needs a GPU"]


@pytest.mark.parametrize(("lengths", "pairs"), [(Lengths(3, 1, 9), 30), (Lengths(2, 4, 0), 20), (Lengths(1, 2, 3), 9)])
def test_pairs_are_queries_times_the_keys_that_each_sees(lengths: Lengths, pairs: int) -> None:
    assert lengths.pairs == pairs


def test_a_decode_reads_each_key_and_value_once() -> None:
    work = gqa.work_of(Lengths(64, 1, 4095))
    assert work.num_bytes == 64 * 4096 * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert work.num_flops == 64 * 4096 * 4 * 32 * 128
    assert work.bound_by_memory(MACHINE)
    assert not gqa.work_of(Lengths(2, 8192, 0)).bound_by_memory(MACHINE)


def test_latent_decodes_of_many_heads_are_bound_by_arithmetic() -> None:
    assert mla.work_of(16, Lengths(32, 1, 32767)).bound_by_memory(MACHINE)
    assert not mla.work_of(128, Lengths(128, 1, 4095)).bound_by_memory(MACHINE)


def test_goals_are_higher_where_the_batch_is_large() -> None:
    assert gqa.goals_of(Lengths(64, 1, 4095)) == (Goal("FLASHINFER", 0.9),)
    assert gqa.goals_of(Lengths(1, 1, 4095)) == (Goal("FLASHINFER", 0.8),)
    assert mla.goals_of(128, Lengths(64, 1, 4095)) == (Goal("FLASHINFER_MLA", 0.65),)


def test_rows_are_compared_with_each_rival_and_the_machine() -> None:
    rows = rows_of(READS, US_OF, "OURS", [Goal("RIVAL", 0.95)], MACHINE)
    assert [(row.rival, row.share, row.reached) for row in rows[:2]] == [("RIVAL", 0.9, False), ("SLOW", 2.0, None)]
    assert (rows[2].rival, rows[2].measured, rows[2].share) == ("a copy", 3000.0, 0.75)
    computes = rows_of(COMPUTES, US_OF, "OURS", [], MACHINE)[-1]
    assert (computes.rival, computes.measured) == ("a matmul", 500.0)
    assert rows_of(READS, {"RIVAL": 1.0}, "OURS", [], MACHINE) == []


def test_the_default_is_compared_with_the_best() -> None:
    row = default_row(READS, US_OF, "OURS", 0.97)
    assert (row.rival, row.share, row.reached) == ("the best, RIVAL", 0.9, False)
    assert default_row(READS, US_OF, "RIVAL", 0.97).reached
    assert default_row(READS, US_OF, "GONE", 0.97).share == 0.0


def test_inputs_that_fit_into_the_cache_take_turns() -> None:
    assert turns(TURN_BYTES) == turns(TURN_BYTES * 10) == 1
    assert turns(TURN_BYTES // 8) == 8
    assert turns(1, most=64) == 64


def test_the_reference_is_causal_with_the_last_query_at_the_last_key() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 6)
    out = attend(q, k, v, scale=0.3)
    scores = (k[:4, 1] @ q[1, 3]) * 0.3
    torch.testing.assert_close(out[1, 3], scores.softmax(0) @ v[:4, 1])


def test_the_last_queries_of_the_first_requests_are_compared() -> None:
    assert checked_rows(Lengths(64, 1, 99)) == [(0, slice(0, 1)), (1, slice(1, 2))]
    assert checked_rows(Lengths(1, 100, 0)) == [(0, slice(68, 100))]


def test_densities_of_the_two_patterns() -> None:
    dense, sparser = (sparse.density_of(params) for params in sparse.PATTERNS)
    assert 0.3 < dense < 0.4
    assert 0.15 < sparser < 0.2


def test_rows_with_a_goal_are_drawn(tmp_path: Path) -> None:
    rows = [*rows_of(READS, US_OF, "OURS", [Goal("RIVAL", 0.8)], MACHINE), Row("copy", "2 GiB", 4000.0, "GB/s")]
    plot.draw(rows, tmp_path / "figures.svg")
    drawn = (tmp_path / "figures.svg").read_text()
    assert drawn.startswith("<?xml")
    assert drawn.count("OURS") == 1
