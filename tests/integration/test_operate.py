"""Commands for operators against a real cluster: drain, adapters, completion, and doctor's JSON."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, machines
from tests.unit.models.lora import save_adapter
from tests.warm import BATON, run_warm


class Cluster(NamedTuple):
    target: str
    start: Machines
    directory: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = save_adapter(LLAMA, tmp_path_factory.mktemp("adapter") / "sql", seed=1, rank=4)
    node: Flags = {"model": LLAMA, "num_blocks": 64, "max_adapters": 2}
    with machines() as start:
        prefill, decode = start.nodes(("prefill", {**node, "name": "p"}), ("decode", {**node, "name": "d"}))
        gateway = start.gateway([prefill], [decode], model=LLAMA)
        yield Cluster(gateway.address, start, directory)


def baton(*arguments: str) -> str:
    """What the command prints, if it ends well."""
    ended = run_warm(BATON, *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def until_adapters(cluster: Cluster, wanted: dict[str, list[str]]) -> None:
    """Until the gateway's view of its nodes has the adapters."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        listed = json.loads(baton("adapter", "list", "--json", "--target", cluster.target))
        found = {node: list(revisions) for node, revisions in listed.items()}
        if found == wanted:
            return
        assert time.monotonic() < deadline_s, found


def test_an_adapter_is_loaded_on_every_node_and_unloaded_from_those_that_are_named(cluster: Cluster) -> None:
    at = ("--target", cluster.target)
    until_adapters(cluster, {"p": [], "d": []})
    printed = baton("adapter", "load", "sql", str(cluster.directory), *at)
    assert [line.split(" (")[0] for line in printed.splitlines()] == ["p has sql", "d has sql"]
    until_adapters(cluster, {"p": ["sql"], "d": ["sql"]})
    assert baton("adapter", "list", *at).startswith("p: sql (")
    assert baton("adapter", "unload", "sql", "--node", "p", *at) == "p no longer has sql\n"
    until_adapters(cluster, {"p": [], "d": ["sql"]})


def test_a_node_that_the_gateway_does_not_know_is_refused_with_those_that_it_knows(cluster: Cluster) -> None:
    ended = run_warm(BATON, "drain", "nobody", "--target", cluster.target)
    assert ended.returncode == 1
    assert ended.stderr == f"baton: {cluster.target} has no node nobody; allowed: p, d\n"


def test_a_node_that_is_asked_to_drain_ends(cluster: Cluster) -> None:
    (node,) = cluster.start.nodes(("decode", {"model": LLAMA, "num_blocks": 64, "name": "d2"}))
    gateway = cluster.start.gateway([], [node], model=LLAMA, local_policy="local")
    printed = baton("drain", "d2", "--target", gateway.address, "--grace-s", "1")
    assert printed == "d2 is draining, and ends after its last request\n"
    assert node.popen.wait(DEADLINE_S) == 0


def test_a_shell_completes_the_names_of_commands() -> None:
    ended = run_warm(BATON, _BATON_COMPLETE="complete_bash", COMP_WORDS="baton ad", COMP_CWORD="1")
    assert ended.stdout.split() == ["adapter"]


@pytest.mark.slow
def test_doctor_prints_its_verdicts_as_one_object() -> None:
    ended = run_warm(BATON, "doctor", "--json", "--min-gb-per-s=0.000001")
    found = json.loads(ended.stdout)
    assert (ended.returncode, found["ok"]) == (0, True)
    assert found["checks"][0].keys() == {"check", "grade", "found", "cure"}
