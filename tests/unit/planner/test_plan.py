"""The search for a cluster, and the command."""

import json
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from baton.core.costs import StepCosts
from baton.core.errors import BatonError, ConfigError, InvalidRequest
from baton.core.types import LocalPolicy
from baton.load.goals import Goal
from baton.load.lengths import Fixed
from baton.load.workload import Synthetic
from baton.planner.cluster import ClusterSpec
from baton.planner.command import parse_seconds
from baton.planner.cost_sources import Lengths, kind_by_roofline, read_costs
from baton.planner.goodput import Measure, find_goodput
from baton.planner.node_spec import NodeSpec
from baton.planner.plan import NOTHING, NodeKind, Plan, Question, find_plan
from baton.planner.report import commands, render, to_json, verdict
from baton.planner.roofline import GPUS
from baton.planner.sizing import decode_step_tokens, prefill_step_tokens
from tests.unit.planner.test_roofline import CONFIGS, size_of
from tests.warm import run_warm

COSTS = StepCosts(((1, 4e-3), (256, 8e-3), (4096, 100e-3)), key_s=3e-8, pair_s=6e-10)
KIND = NodeKind(1, COSTS, COSTS, 800_000, 131072, 100e9)
LONG = Synthetic(Fixed(4000), Fixed(40))
GOAL = Goal(ttft_s=1.0, tpot_s=0.012)
FAST = Measure(requests=50, seconds=3.0, precision=0.2)


def plan(**changes: object) -> Plan:
    question = Question(KIND, LONG, GOAL, rate=None, gpus=2, measure=FAST)
    return find_plan(replace(question, **changes))  # type: ignore[arg-type]


def test_every_split_and_the_colocated_cluster_are_compared_best_first() -> None:
    found = plan(gpus=3)
    assert {(option.spec.prefills, option.spec.decodes) for option in found.options} == {(0, 3), (1, 2), (2, 1)}
    rates = [option.rate for option in found.options]
    assert rates == sorted(rates, reverse=True)
    assert found.colocated.spec.policy is LocalPolicy.LOCAL
    assert found.best.rate >= found.colocated.rate > 0


def test_the_least_number_of_nodes_serves_the_rate() -> None:
    alone = plan(gpus=1).best.rate
    assert plan(gpus=None, rate=0.5 * alone).nodes == 1
    more = plan(gpus=None, rate=1.6 * alone)
    assert 2 <= more.nodes <= 3
    assert more.serves


def test_an_slo_that_no_node_meets_gives_no_rate_and_no_commands() -> None:
    found = plan(goal=Goal(ttft_s=0.01, tpot_s=0.012))
    assert found.best.rate == 0
    assert not found.serves
    assert "first tokens" in verdict(found)
    assert to_json(found, model="m", costs="c")["commands"] == []
    with pytest.raises(ConfigError, match="looser SLO"):
        plan(goal=Goal(ttft_s=0.01, tpot_s=0.012), gpus=None, rate=1.0)


def test_too_few_gpus_for_one_node_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 GPUs are less"):
        plan(kind=replace(KIND, gpus=4))


def test_goodput_is_the_edge_between_meeting_and_failing() -> None:
    node = NodeSpec(COSTS, step_tokens=1024)
    spec = ClusterSpec(1, 1, node, node, LocalPolicy.STRICT)
    for start in (0.5, 200.0):
        found = find_goodput(spec, LONG, GOAL, start=start, measure=FAST)
        assert found.outcome.share() >= GOAL.share > found.limit.share()
        # A prompt takes a prefill node about 0.11 s.
        assert 5 < found.rate < 10


def test_a_search_ends_where_no_rate_fails() -> None:
    nothing = StepCosts(((1, 1e-7), (4096, 1e-6)), key_s=0.0, pair_s=0.0)
    found = plan(kind=replace(KIND, prefill=nothing, decode=nothing), gpus=1, workload=Synthetic(Fixed(4), Fixed(1)))
    assert found.best.limit == NOTHING
    assert "ended there" in verdict(found)


def test_step_sizes_follow_the_slo() -> None:
    assert prefill_step_tokens(COSTS, 4000, ttft_s=0.02) < prefill_step_tokens(COSTS, 4000, ttft_s=None)
    assert decode_step_tokens(COSTS, 0.01) < decode_step_tokens(COSTS, 0.1)


def test_ranks_are_added_until_weights_and_cache_fit() -> None:
    llama = size_of("llama-3.1-8b")
    lengths = Lengths(1000, 16000)
    ranks = {
        gpu: kind_by_roofline(llama, GPUS[gpu], lengths, ranks=None, link_bytes_per_s=1e9).gpus
        for gpu in ("l4", "h200")
    }
    assert ranks == {"l4": 2, "h200": 1}
    with pytest.raises(ConfigError, match="do not fit"):
        kind_by_roofline(llama, GPUS["l4"], lengths, ranks=1, link_bytes_per_s=1e9)


def test_the_report_names_nodes_rates_and_lines_that_start_them() -> None:
    found = plan(gpus=3)
    console = Console(width=160, file=StringIO(), record=True)
    console.print(render(found, model="my-model", title="a load", costs="costs"))
    shown = console.export_text()
    assert "3 colocated" in shown
    assert f"{found.best.rate:.3g}" in shown
    best = found.best.spec
    assert f" {best.prefill.step_tokens}/{best.decode.step_tokens} " in shown
    start = f"baton up --model my-model --prefill-nodes {best.prefills} --decode-nodes {best.decodes}"
    assert any(start in line for line in commands(found, "my-model"))
    assert json.loads(json.dumps(to_json(found, model="my-model", costs="costs")))["nodes"] == 3


def test_the_settings_of_ranks_are_in_every_line_that_starts_a_node() -> None:
    own = replace(KIND, gpus=2, own_requests=True, redundant_experts=8)
    up, *nodes, _ = [line for line in commands(plan(kind=own, gpus=4), "m") if not line.startswith("#")]
    assert nodes
    assert "BATON_ATTENTION_DATA_PARALLEL=true BATON_EXPERT_PARALLEL=true BATON_REDUNDANT_EXPERTS=8 baton up" in up
    for line in nodes:
        assert "--tensor-parallel-size 2 --attention-data-parallel --expert-parallel --redundant-experts 8 " in line
    assert not any("parallel" in line for line in commands(plan(gpus=2), "m"))


def test_costs_are_read_for_both_roles_or_for_each(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    one = {"points": [{"tokens": 1, "seconds": 0.004}, {"tokens": 8, "seconds": 0.005}], "key_s": 1e-8}
    path.write_text(json.dumps({"step_costs": one}))
    assert read_costs(path) == (StepCosts(((1, 0.004), (8, 0.005)), key_s=1e-8),) * 2
    path.write_text(json.dumps({"prefill": one, "decode": {**one, "key_s": 0}}))
    assert [costs.key_s for costs in read_costs(path)] == [1e-8, 0]
    for wrong in ("[]", "{}", json.dumps({"points": []}), json.dumps({"points": one["points"][::-1]})):  # type: ignore[index]
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_costs(path)


def test_times_have_units() -> None:
    assert [parse_seconds(text) for text in ("400ms", "2s", "50us", "1.5 s")] == pytest.approx([0.4, 2, 5e-5, 1.5])
    for text in ("400", "-1s", "xms", ""):
        with pytest.raises(InvalidRequest):
            parse_seconds(text)


def test_the_program_plans_from_a_config_alone_and_says_what_is_missing() -> None:
    plan = partial(run_warm, "baton.planner", "--model", str(CONFIGS / "llama-3.1-8b"), "--workload", "long")
    flags = ["--ttft", "2s", "--tpot", "20ms", "--gpus", "1", "--quick", "--json"]
    done = plan(*flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["best"]["goodput"] > 1
    assert "--local-policy local" in found["commands"][0]
    for missing, what in ((["--ttft", "2s"], "--gpus"), (["--gpus", "1"], "--ttft")):
        done = plan(*missing)
        assert done.returncode == 1
        assert what in done.stderr


def test_a_node_that_cannot_be_reached_is_an_error() -> None:
    from baton.planner.cost_sources import kind_from_nodes

    with pytest.raises(BatonError):
        kind_from_nodes(["127.0.0.1:1"], link_bytes_per_s=1e9)
