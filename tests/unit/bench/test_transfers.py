"""The rows and plots that the transfer benchmarks make of their measurements."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.types import Path as Route
from baton.core.types import Receipt
from bench import exposed, receiving, transfer_gpu, transfer_plot
from bench.cache_to_cache import Scale, best_gigabytes_per_s, first_rows, work_of
from bench.table import Row

EQUAL = Scale().equal


def receipt(*, prefill_s: float, transfer_s: float, layer_groups: int = 1) -> Receipt:
    return Receipt(
        path=Route.REMOTE,
        why="",
        prefill_node="p",
        decode_node="d",
        prompt_tokens_sent=8192,
        bytes_sent=1,
        segments=1,
        transport="sysv",
        queue_s=0.0,
        prefill_s=prefill_s,
        transfer_s=transfer_s,
        ttft_s=0.0,
        total_s=0.0,
        attempts=1,
        prefill_cached_tokens=0,
        segment_bytes=1,
        kv_converted="",
        layer_groups=layer_groups,
    )


def test_throughput_is_the_prompts_kv_over_its_best_time() -> None:
    assert EQUAL.spec.bytes_per_token == 64 << 10
    assert best_gigabytes_per_s(EQUAL.spec, 2000, [0.5, 0.131072, 0.2]) == pytest.approx(1.0)


def test_the_first_transfers_are_compared_with_the_tenth_ones() -> None:
    pairs = [[0.3, *[9.0] * 8, 0.2, 9.0], [0.5, *[9.0] * 8, 0.4, 9.0], [0.1, *[9.0] * 8, 0.3, 9.0]]
    (row,) = first_rows("some work", pairs)
    assert (row.measured, row.rival_measured, row.share, row.reached) == (300.0, 300.0, 1.0, True)


def test_the_unequal_pairs_differ_from_the_equal_one_in_their_ends_only() -> None:
    for case in Scale().unequal:
        assert case != EQUAL
        assert replace(case, source=EQUAL.source, target=EQUAL.target) == EQUAL


def test_gpu_cases_are_put_on_both_devices() -> None:
    for case in transfer_gpu.MODELS[0].on(("cuda:0", "cuda:1"), 77):
        assert (case.source.device, case.target.device, case.tokens) == ("cuda:0", "cuda:1", 77)


def test_the_exposed_share_is_the_median_over_prompts() -> None:
    setup = exposed.on_cpu()
    times = ((2.0, 0.2, 1), (1.0, 0.01, 3), (4.0, 0.16, 1))
    receipts = [receipt(prefill_s=one, transfer_s=other, layer_groups=groups) for one, other, groups in times]
    seen = exposed.Seen(receipts, late_ms=[3.0, 1.0, 2.0])
    share, transfer, prefill, late = exposed.rows_of(setup, setup.ways[0], 8192, seen)
    assert share.measured == pytest.approx(4.0)
    assert (share.limit, share.reached) == (5.0, True)
    assert [row.measured for row in (transfer, prefill, late)] == pytest.approx([160.0, 2000.0, 2.0])
    assert "in 3 layer groups" in share.work
    (other, *_) = exposed.rows_of(setup, setup.ways[0], 1024, seen)
    assert other.limit is None


def test_decoding_may_lose_the_share_of_bandwidth_that_receiving_takes() -> None:
    setup = receiving.on_cpu()
    free = receiving.Stretches([10.0, 10.0], [12.0, 13.0], [1.0, 1.0])
    rows = {row.name: row for row in receiving.rows_of(setup, free, free, limit=0.5, memory=20.0)}
    assert rows["share of it that receiving takes"].measured == pytest.approx(25.0)
    assert rows["slow-down, receiving"].measured == pytest.approx(1.25)
    assert rows["slow-down, receiving"].limit == pytest.approx(4 / 3)
    assert rows["slow-down, receiving, limited"].reached is False


def test_the_rate_is_limited_in_proportion_to_the_slow_down_of_decoding() -> None:
    free = receiving.Stretches([10.0], [12.0], [2.0])
    assert receiving.limit_gigabytes_per_s(free) == pytest.approx(2.0 * 0.35 * 0.05 / 0.2)
    unharmed = receiving.Stretches([10.0], [10.0], [2.0])
    assert receiving.limit_gigabytes_per_s(unharmed) == 2.0


def test_messages_are_drawn_by_their_size_next_to_every_rival(tmp_path: Path) -> None:
    rows = [
        Row("transport", f"{size} messages over sysv", 5.0, "GB/s", rival, 6.0)
        for size in ("256 KiB", "1 MiB", "64 MiB")
        for rival in ("ucx_perftest", "NIXL", "memcpy")
    ]
    drawn = draw(rows, tmp_path)
    for text in ("messages over sysv", "ucx_perftest", "NIXL", "memcpy", "Baton"):
        assert text in drawn


def test_prompts_are_drawn_by_their_length_for_each_model(tmp_path: Path) -> None:
    unequal = Scale().unequal[0]
    rows = []
    for model in ("Llama 8B", "DeepSeek V3"):
        for tokens in (1024, 8192):
            rows.append(Row("cache to cache", work_of(EQUAL, tokens, model), 4.0, "GB/s", "plain copy", 9.0))
            rows.append(Row("cache to cache", work_of(unequal, tokens, model), 3.0, "GB/s", "equal ends", 4.0))
    rows.append(Row("cache to cache", work_of(Scale().fixed[0], 1024, model), 3.0, "GB/s"))
    drawn = draw(rows, tmp_path)
    for text in ("Llama 8B", "DeepSeek V3", "NHD/16 to NHD/16", "NHD/16 to HND/16", "plain copy"):
        assert text in drawn
    assert "equal ends" not in drawn, "it is a curve of its own"
    assert "segments of 1 MiB" not in drawn, "one point is not a curve"


def test_nothing_to_draw_leaves_no_file(tmp_path: Path) -> None:
    transfer_plot.draw([Row("waiting", "open lease", 1.0, "%")], tmp_path / "drawn.svg")
    assert not (tmp_path / "drawn.svg").exists()


def draw(rows: list[Row], tmp_path: Path) -> str:
    transfer_plot.draw(rows, tmp_path / "drawn.svg")
    return (tmp_path / "drawn.svg").read_text()
