"""The doctor's verdicts on described machines, and on the machine of the test."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.cli.doctor import template_warnings
from baton.models.families.reader import read_config
from baton.models.loading.needs import kv_cache_spec
from baton.node.doctor import link
from baton.node.doctor.checks import cache_bytes_of, check_packages
from baton.node.doctor.link import check_link
from baton.node.doctor.machine import MIB, Host, Wanted, check_machine, read_host
from baton.node.doctor.verdict import Grade, Verdict
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import CPU_CACHE_MIB, DecodeSettings
from tests.unit.gateway.chat.checkpoints import TEMPLATES
from tests.warm import BATON, run_warm

HEALTHY = {"dev/shm/.keep": "", "sys/fs/cgroup/memory.max": "max\n"}
HOST = Host(available_bytes=8 << 30, first_process="systemd", locked_bytes=8 * MIB, open_files=1 << 16)
WANTED = Wanted(pairs=1, cache_bytes=128 * MIB, staging_bytes=2 * MIB)


def verdicts(
    root: Path, files: dict[str, str] | None = None, wanted: Wanted = WANTED, host: Host = HOST
) -> dict[str, Verdict]:
    for name, text in {**HEALTHY, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {verdict.check: verdict for verdict in check_machine(wanted, host, root)}


def test_a_healthy_machine_has_no_cure_to_offer(tmp_path: Path) -> None:
    found = verdicts(tmp_path)
    assert {verdict.grade for verdict in found.values()} == {Grade.OK}
    assert {verdict.cure for verdict in found.values()} == {""}


def test_shared_memory_that_is_missing_or_too_small(tmp_path: Path) -> None:
    small = verdicts(tmp_path, wanted=Wanted(pairs=1 << 30))["/dev/shm"]
    assert small.grade is Grade.FAIL
    assert "sizeLimit" in small.cure
    (tmp_path / "dev/shm/.keep").unlink()
    (tmp_path / "dev/shm").rmdir()
    (missing,) = [verdict for verdict in check_machine(WANTED, HOST, tmp_path) if verdict.check == "/dev/shm"]
    assert (missing.grade, missing.found) == (Grade.FAIL, "missing")


@pytest.mark.parametrize("file", ["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"])
def test_a_container_with_less_memory_than_the_cache_needs(tmp_path: Path, file: str) -> None:
    limits = {"sys/fs/cgroup/memory.max": "max", file: str(100 * MIB)}
    verdict = verdicts(tmp_path, limits)["memory"]
    assert verdict.grade is Grade.FAIL
    assert verdict.found.startswith("100 MiB allowed to this container")


def test_a_containers_own_process_namespace_is_a_warning(tmp_path: Path) -> None:
    verdict = verdicts(tmp_path, host=replace(HOST, first_process="python"))["process namespace"]
    assert verdict.grade is Grade.WARN
    assert "shareProcessNamespace" in verdict.cure
    unknown = verdicts(tmp_path, host=replace(HOST, first_process=""))["process namespace"]
    assert (unknown.grade, unknown.found) == (Grade.OK, "unknown")


def test_limits_of_the_process_that_are_too_low(tmp_path: Path) -> None:
    files = verdicts(tmp_path, host=replace(HOST, open_files=200))["open files"]
    assert files.grade is Grade.FAIL
    assert "ulimit -n" in files.cure
    memory = verdicts(tmp_path, host=replace(HOST, available_bytes=MIB))["memory"]
    assert memory.grade is Grade.FAIL
    assert memory.found.startswith("1 MiB available")


def test_this_machine_and_process_are_read() -> None:
    host = read_host()
    assert host.available_bytes > 0
    assert host.open_files != 0


def test_an_rdma_device_needs_a_way_in_an_active_port_and_locked_memory(tmp_path: Path) -> None:
    state = "sys/class/infiniband/mlx5_0/ports/1/state"
    shut = verdicts(tmp_path, {state: "4: ACTIVE\n"})["RDMA devices"]
    assert (shut.grade, "none can be opened" in shut.found) == (Grade.FAIL, True)
    opened = {state: "4: ACTIVE\n", "dev/infiniband/uverbs0": ""}
    assert verdicts(tmp_path, opened)["RDMA devices"] == Verdict("RDMA devices", Grade.OK, "mlx5_0")
    assert verdicts(tmp_path, {**opened, state: "1: DOWN\n"})["RDMA devices"].grade is Grade.FAIL


def test_packages_are_imported_and_not_just_looked_up() -> None:
    assert [verdict.grade for verdict in check_packages()] == [Grade.OK] * 4


def test_a_link_under_its_floor_fails_with_its_measurement() -> None:
    verdict = check_link(("cpu", "cpu"), floor_gigabytes_per_s=1e6)
    assert verdict.grade is Grade.FAIL
    assert "GB/s" in verdict.found
    assert "there and back" in verdict.found


@pytest.mark.slow
def test_the_command_prints_a_verdict_per_line_and_exits_with_the_worst() -> None:
    def doctor(*flags: str) -> "subprocess.CompletedProcess[str]":
        return run_warm(BATON, "doctor", *flags)

    well = doctor("--min-gb-per-s=0.000001")
    assert well.returncode == 0, well.stdout + well.stderr
    lines = [line for line in well.stdout.splitlines() if not line.startswith(" ")]
    assert lines[-1] == "all well"
    assert all(line.split()[0] in ("ok", "warn") for line in lines[:-1])
    ill = doctor("--min-gb-per-s=1000000")
    assert ill.returncode == 1
    assert ill.stdout.splitlines()[-1] == "1 failed"


@pytest.mark.slow
def test_a_template_whose_tool_calls_nobody_reads_is_a_warning(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["unknown"])
    ended = run_warm(BATON, "doctor", "--json", "--min-gb-per-s=0.000001", BATON_CHAT_TEMPLATE=str(template))
    found = json.loads(ended.stdout)
    (verdict,) = [check for check in found["checks"] if check["check"] == "chat template"]
    assert (ended.returncode, verdict["grade"]) == (0, "warn")
    assert "calls come out as text" in verdict["found"]
    assert "--chat-template" in verdict["cure"]


def test_a_template_that_cannot_be_read_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CHAT_TEMPLATE", str(tmp_path / "missing.jinja"))
    (warning,) = template_warnings()
    assert "missing.jinja" in warning


def test_the_demo_models_template_is_no_warning() -> None:
    assert template_warnings() == ()


class FakeTransport:
    """The transport of a GPU whose memory only "cuda_ipc" reaches."""

    def __init__(self, carrier: str) -> None:
        self._carrier = carrier

    def carrier(self, _peer: int) -> str:
        return self._carrier


@pytest.mark.parametrize(
    ("carrier", "device", "expected"),
    [
        ("cuda_ipc", "cuda:1", ("cuda_ipc", "cuda:1")),
        ("cma", "cuda:1", ("cma through host memory", "cpu")),
        ("cma", "cpu", ("cma", "cpu")),
    ],
)
def test_a_link_is_measured_from_the_memory_that_nodes_use_for_it(
    carrier: str, device: str, expected: tuple[str, str]
) -> None:
    transport: Any = FakeTransport(carrier)
    assert link.where_messages_lie(transport, device) == expected


def test_a_gpu_is_current_before_ucx_is_opened_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"current {device}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("context"))
    monkeypatch.setattr(link, "open_transport", lambda name, *, on_gpu: calls.append(f"{name} on GPU: {on_gpu}"))
    link.open_as_a_node("cuda:1")
    assert calls == ["current cuda:1", "context", "ucx on GPU: True"]
    calls.clear()
    link.open_as_a_node("cpu")
    assert calls == ["ucx on GPU: False"]


def test_a_cache_in_main_memory_is_counted_as_a_node_takes_it() -> None:
    def counted(**settings: object) -> int:
        values = {"model": DEMO_MODELS / "llama", "device": "cpu", **settings}
        return cache_bytes_of(DecodeSettings.model_validate(values))

    spec = kv_cache_spec(read_config(DEMO_MODELS / "llama"), "float32")
    assert counted(num_blocks=10, block_size=16, dtype="float32") == 160 * spec.bytes_per_token
    assert counted(kv_cache_mib=3, tensor_parallel_size=2) == 6 * MIB
    assert counted() >= CPU_CACHE_MIB * MIB
    assert counted(model=Path("/nowhere")) == CPU_CACHE_MIB * MIB
