"""A link below the operator's floor is a reason to refuse the pair, with a cure for its transport."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.node.describe import describe_measure, from_measure, to_measure
from baton.node.link_floor import below_floor, machine_cures
from baton.settings.node_config import DecodeSettings
from kvtransfer.records import LinkMeasure
from tests.unit.node.test_doctor import HOST, WANTED, verdicts

MEASURE = LinkMeasure("tcp", 1.25, latency_s=40e-6, message_cost_s=90e-6)


def node(floor: float) -> Any:
    settings = DecodeSettings.model_validate({"link_floor_gb_per_s": floor})
    cache = SimpleNamespace(view=torch.zeros(1))
    return SimpleNamespace(settings=settings, name="decode-7", built=SimpleNamespace(cache=cache))


@pytest.mark.parametrize("floor", [0.0, 1.25])
def test_at_the_floor_and_without_one_there_is_no_reason(floor: float) -> None:
    assert below_floor(node(floor), MEASURE) is None


def test_below_the_floor_both_sides_get_the_measurement_and_the_floor() -> None:
    reason = below_floor(node(2), MEASURE)
    assert reason is not None
    assert (reason.field, reason.ours) == ("link", "1.25 GB/s over tcp (measured)")
    assert reason.theirs == "at least 2 GB/s (required by decode-7, --link-floor-gb-per-s)"


@pytest.mark.parametrize(
    ("transport", "word"),
    [
        ("tcp", "shareProcessNamespace"),
        ("tcp", "/dev/shm"),
        ("tcp", "memlock"),
        ("tcp", "UCX_NET_DEVICES"),
        ("sysv through host memory", "make both visible to both"),
        ("cuda_ipc", "lower the floor"),
    ],
)
def test_the_cure_is_for_the_transport(transport: str, word: str) -> None:
    reason = below_floor(node(2), LinkMeasure(transport, 0.5))
    assert reason is not None
    assert word in reason.cure


def test_the_doctors_findings_on_this_machine_are_part_of_the_cure(tmp_path: Any) -> None:
    verdicts(tmp_path)  # writes a healthy machine's files
    assert list(machine_cures(WANTED, HOST, tmp_path)) == []
    (found,) = machine_cures(WANTED, replace(HOST, first_process="python"), tmp_path)
    assert found.startswith("process namespace a container's own")
    assert "hostPID" in found


def test_a_measurement_is_sent_unchanged_to_the_other_side() -> None:
    assert to_measure(from_measure(MEASURE)) == MEASURE
    assert describe_measure(MEASURE) == "tcp at 1.2 GB/s, 40 us one way, 90 us for one more message"
