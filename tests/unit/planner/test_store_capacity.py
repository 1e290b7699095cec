"""What a plan says of KV outside of the nodes' caches."""

from dataclasses import replace

import pytest

from baton.planner.cost_sources import Lengths, kind_by_roofline
from baton.planner.report import commands, to_json
from baton.planner.roofline import GPUS
from baton.planner.store_capacity import StoreSizes, capacity_lines, store_capacities
from tests.unit.planner.test_plan import KIND, plan
from tests.unit.planner.test_roofline import size_of

GIB = 1 << 30
LENGTHS = Lengths(1000, 8000)


def test_each_rank_has_its_share_of_a_tokens_kv() -> None:
    assert KIND.tokens_in(64) == 64 * GIB // 131072
    assert replace(KIND, gpus=4).tokens_in(64) == 4 * 64 * GIB // 131072
    assert replace(KIND, gpus=4, kv_holders=1).tokens_in(64) == 64 * GIB // 131072, "every rank has all of MLA's KV"


def test_ranks_without_heads_of_their_own_hold_the_same_tokens_again() -> None:
    llama = kind_by_roofline(size_of("llama-3.1-8b"), GPUS["h200"], LENGTHS, ranks=16, link_bytes_per_s=1e9)
    assert llama.tokens_in(1) == 8 * GIB // 131072


def test_hours_are_those_of_the_rate_that_a_decode_node_serves() -> None:
    found = plan(gpus=None, rate=1.0)
    (host,) = store_capacities(found, StoreSizes(host_gib=64))
    tokens_an_hour = 3600 * 1.0 * 4040 / found.best.spec.decodes
    assert (host.store, host.tokens) == ("host memory", 524288)
    assert host.hours == pytest.approx(524288 / tokens_an_hour)


def test_the_report_has_a_line_for_each_store_and_its_flags() -> None:
    found, sizes = plan(gpus=2), StoreSizes(64, 500)
    host, files, assumed = capacity_lines(found, sizes)
    assert "loads from host memory at 5 GB/s and pulls from other nodes of 5 ms and 2 GB/s" in assumed
    assert host.startswith("64 GiB of host memory for each GPU hold 524k tokens of a node: ")
    assert files.startswith("500 GiB of files for each GPU hold 4.10M tokens of a node: ")
    lines = commands(found, "m", sizes)
    flags = "--host-cache-gib 64 --file-cache-dir DIRECTORY --file-cache-gib 500"
    assert any("baton decode-node" in line and flags in line for line in lines)
    assert any("BATON_FILE_CACHE_GIB=500" in line and "baton up" in line for line in lines)
    kept = to_json(found, model="m", costs="c", stores=sizes)["kept"]
    assert isinstance(kept, list)
    assert [each["tokens"] for each in kept] == [524288, 4096000]


def test_without_stores_a_plan_says_what_a_gib_would_hold() -> None:
    (line,) = capacity_lines(plan(gpus=1), StoreSizes())
    assert line == "a GiB of --host-cache-gib or --file-cache-gib holds 8k more tokens of a node"


def test_each_request_leaves_two_recurrent_states() -> None:
    kind = replace(KIND, state_bytes=1000 * 131072)
    assert kind.tokens_in(64, request_tokens=2000) == 64 * GIB // (2 * 131072)
    found = plan(gpus=1, kind=kind, host_gib=64.0)
    assert next(iter(store_capacities(found, StoreSizes(64)))).tokens < 524288
    assert found.best.spec.decode.host_tokens == 0
    assert [*capacity_lines(found, StoreSizes(64))][-1].startswith("simulated without host memory")
