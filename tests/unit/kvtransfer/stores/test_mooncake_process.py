"""What opening Mooncake Store refuses, and how its process is bounded; a stand-in for Mooncake's client answers.

`tests/clients/test_mooncake.py` has the real store.
"""

import os
import socket
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest
from packaging.requirements import Requirement

from baton.core.errors import ConfigError
from kvtransfer.stores.mooncake import DEFAULT_PORT, open_mooncake, parse_mooncake_url
from kvtransfer.stores.mooncake_process import MooncakeProcess

DEADLINE_S = 60.0
# Its calls do what their first key says.
CLIENT = """
import os, time
from pathlib import Path

class MooncakeDistributedStore:
    def setup(self, *_):
        return 0

    def register_buffer(self, *_):
        return 0

    def batch_is_exist(self, keys):
        if keys[0] == "hang":
            Path(__file__).with_name("hanging").touch()
            time.sleep(600)
        if keys[0] == "end":
            os._exit(1)
        return [-900 if key == "lost" else 1 for key in keys]

    def get_into(self, key, address, size):
        return size
"""


@pytest.fixture
def master() -> Iterator[int]:
    """A port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `mooncake`, which this process and its children import."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text(CLIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


@pytest.fixture
def process(client: Path, master: int) -> Iterator[MooncakeProcess]:
    process = MooncakeProcess("127.0.0.1", master, 4096, lanes=2, timeout_s=0.5, pause_s=0.01)
    try:
        assert process.wait_ready(DEADLINE_S)
        yield process
    finally:
        process.close()


def call(process: MooncakeProcess, *keys: str, timeout_s: float | None = DEADLINE_S) -> list[int] | None:
    """Asks whether the store has these keys. Returns None if it cannot be asked. `timeout_s` None: its usual bound."""
    with process.lane() as lane:
        return None if lane is None else lane.call("has", keys, timeout_s)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mooncake://mooncake-master:50051", ("mooncake-master", 50051)),
        ("mooncake://mooncake-master.kv.svc.cluster.local", ("mooncake-master.kv.svc.cluster.local", DEFAULT_PORT)),
        ("mooncake://10.0.0.7:1/", ("10.0.0.7", 1)),
    ],
)
def test_a_url_names_the_master(url: str, address: tuple[str, int]) -> None:
    assert parse_mooncake_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "mooncake",
        "mooncake://",
        "mooncake://:50051",
        "mooncake://host:0",
        "mooncake://host:65536",
        "mooncake://host:port",
        "mooncake://host:50051/models",
        "mooncake://host:50051?protocol=rdma",
        "mooncake://user:secret@host:50051",
        "mooncake://[::1]:50051",
        "mooncake://-flag:50051",
        "mooncake://host:50051\n",
        "redis://host:50051",
        "host:50051",
    ],
)
def test_another_url_is_refused_with_the_allowed_form(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_mooncake_url(url)
    error = caught.value
    assert (error.field, error.value, error.allowed) == ("kv_store", url, ("mooncake://HOST:PORT",))
    assert str(DEFAULT_PORT) in error.cure


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match=r"not installed.*baton-serving\[mooncake\]"):
        open_mooncake("mooncake://127.0.0.1:1", b"model", 4096)


def test_the_extra_is_pinned_and_tested_at_its_pin() -> None:
    root = Path(__file__).resolve().parents[4]
    (wanted,) = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["mooncake"]
    requirement = Requirement(wanted)
    for file in ("constraints.txt", "tests/clients/environments/mooncake.constraints"):
        pins = dict(line.split("==") for line in (root / file).read_text().splitlines())
        assert requirement.specifier.contains(pins[requirement.name]), file


def test_a_client_that_lacks_a_library_is_refused_with_its_name(client: Path) -> None:
    (client / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1: cannot open.*libibverbs1"):
        open_mooncake("mooncake://127.0.0.1:1", b"model", 4096)


def test_a_call_has_one_code_for_each_key(process: MooncakeProcess) -> None:
    assert call(process, "a", "b", "c") == [1, 1, 1]


def test_a_call_that_hangs_ends_with_its_bound_and_its_process(process: MooncakeProcess) -> None:
    pid = process.pid
    with pytest.raises(TimeoutError):
        call(process, "hang", timeout_s=None)
    assert process.wait_ready(DEADLINE_S)
    assert process.pid != pid
    assert call(process, "a") == [1]


def test_a_caller_that_is_interrupted_leaves_no_answer_to_the_next(process: MooncakeProcess) -> None:
    pid = process.pid
    with suppress(KeyboardInterrupt), process.lane():
        raise KeyboardInterrupt
    assert process.wait_ready(DEADLINE_S)
    assert process.pid != pid
    assert call(process, "a", "b") == [1, 1]


def test_a_caller_gets_a_lane_as_soon_as_one_is_idle(client: Path, master: int) -> None:
    process = MooncakeProcess("127.0.0.1", master, 4096, lanes=1, timeout_s=DEADLINE_S)
    try:
        assert process.wait_ready(DEADLINE_S)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: call(process, "a"), range(200))) == [[1]] * 200
    finally:
        process.close()


@pytest.mark.parametrize("key", ["lost", "end"])
def test_a_lost_master_or_process_ends_the_calls_of_all_lanes(process: MooncakeProcess, client: Path, key: str) -> None:
    outcomes: list[object] = []

    def hang() -> None:
        try:
            with process.lane() as lane:
                assert lane is not None
                outcomes.append(lane.call("has", ["hang"], DEADLINE_S))
        except OSError as error:
            outcomes.append(error)

    other = Thread(target=hang)
    other.start()
    deadline = time.monotonic() + DEADLINE_S
    while not (client / "hanging").exists():  # its call has reached the process
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ConnectionError):
        call(process, "a", key) if key == "lost" else call(process, key)
    other.join(DEADLINE_S)
    assert [type(outcome) for outcome in outcomes] == [ConnectionResetError]


def test_there_is_no_lane_while_all_are_busy(process: MooncakeProcess) -> None:
    with process.lane() as first, process.lane() as second:
        assert first is not None
        assert second is not None
        assert call(process, "a") is None
    assert call(process, "a") == [1]


def test_a_process_that_is_closed_has_no_lane_and_no_child(process: MooncakeProcess) -> None:
    child = psutil.Process(process.pid)
    process.close()
    assert call(process, "a") is None
    assert not child.is_running()


def test_a_client_that_ends_its_process_means_no_lane(
    client: Path, master: int, caplog: pytest.LogCaptureFixture
) -> None:
    (client / "store.py").write_text("import os; os.abort()")
    process = MooncakeProcess("127.0.0.1", master, 4096, pause_s=0.01)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while "ended at its start" not in caplog.text:
            assert time.monotonic() < deadline
            assert not process.wait_ready(0.01)
    finally:
        process.close()


def test_another_server_in_the_masters_place_means_no_lane(
    client: Path, master: int, caplog: pytest.LogCaptureFixture
) -> None:
    (client / "store.py").write_text(CLIENT.replace("return 0", "return -1"))
    process = MooncakeProcess("127.0.0.1", master, 4096, pause_s=0.01)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while "is this the port of a mooncake_master?" not in caplog.text:
            assert time.monotonic() < deadline
            assert not process.wait_ready(0.01)
    finally:
        process.close()


def test_a_master_that_is_not_there_means_no_lane(client: Path) -> None:
    process = MooncakeProcess("127.0.0.1", 1, 4096)
    try:
        assert not process.wait_ready(0.1)
        assert call(process, "a") is None
    finally:
        process.close()
