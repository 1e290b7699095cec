"""Files that somebody named are regular ones: read within bounds, and written whole or not at all."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from baton.cli import program
from baton.cli.program import new_app
from baton.core.errors import ConfigError, InvalidRequest
from baton.core.expert_load import read_expert_load
from baton.core.ready_file import check_ready_file, write_ready_file
from baton.core.regular_file import check_can_write, write_regular_file
from baton.load.command import bench
from baton.load.plots import check_plot
from baton.load.results import LoadResults, read_results
from baton.load.traces import read_trace
from baton.planner.cost_sources import read_costs
from baton.security.certificates import write_set
from tests.warm import run_warm

DEADLINE_S = 60.0


def bench_program() -> typer.Typer:
    """`python -m baton.load`, as which `baton bench` runs."""
    app = new_app()
    app.command()(bench)
    return app


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_device(path: Path) -> None:
    """A device node; a pipe where the kernel lets nobody make one."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        os.mkfifo(path)


def make_link(path: Path) -> None:
    (path.parent / "linked").write_text("as before")
    path.symlink_to("linked")


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


NOT_REGULAR: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "device": make_device,
    "directory": os.mkdir,
    "link": make_link,
    "dangling link": make_dangling_link,
}


@pytest.fixture(params=NOT_REGULAR)
def something(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A path that names something that is not a regular file; afterwards it is unchanged, and nothing is next to it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "output.png"
    NOT_REGULAR[request.param](path)
    before, names = path.lstat(), set(os.listdir(folder))
    yield path
    after = path.lstat()
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert set(os.listdir(folder)) == names
    if "linked" in names:
        assert (folder / "linked").read_text() == "as before"


def test_only_a_regular_file_is_replaced(something: Path) -> None:
    with pytest.raises(OSError, match="it is a"):
        write_regular_file(something, "new")
    with pytest.raises(OSError, match="it is a"):
        check_can_write(something)


def test_no_door_of_a_process_or_a_command_replaces_anything_else(something: Path) -> None:
    with pytest.raises(ConfigError, match=r"BATON_READY_FILE \(--ready-file\) is .*, which cannot be written: it is a"):
        check_ready_file(something)
    with pytest.raises(ConfigError, match="it is a"):
        write_ready_file(something, address="127.0.0.1:1")
    with pytest.raises(InvalidRequest, match="it is a"):
        LoadResults([]).write(something)
    with pytest.raises(InvalidRequest, match="it is a"):
        check_plot(something)
    for app, command in (
        (program(), ["key", "alice", "--file", str(something)]),
        (program(), ["expert-load", "127.0.0.1:9", "--output", str(something)]),
        (bench_program(), ["127.0.0.1:9", "--json", str(something)]),
    ):
        error = CliRunner().invoke(app, command).exception
        assert isinstance(error, ConfigError | InvalidRequest)
        assert "it is a" in str(error), command


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_certificates_replace_nothing_but_files(kind: str, tmp_path: Path) -> None:
    NOT_REGULAR[kind](tmp_path / "gateway.key")
    with pytest.raises(OSError, match="it is a"):
        write_set(tmp_path, hosts=["localhost"], days=1)
    assert not stat.S_ISREG((tmp_path / "gateway.key").lstat().st_mode)
    assert set(os.listdir(tmp_path)) <= {"gateway.key", "linked"}


@pytest.mark.parametrize("module", ["baton.gateway", "baton.gateway.picker", "decode_node"])
def test_a_ready_file_that_cannot_be_written_is_found_before_anything_is_loaded(module: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    flags = ["--ready-file", str(tmp_path / "ready"), "--model", str(tmp_path)]
    if module == "baton.gateway.picker":
        flags = flags[:-2]
    done = run_warm(module, *flags, timeout_s=DEADLINE_S)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "BATON_READY_FILE (--ready-file)" in line
    assert "it is a pipe, no regular file; name a new file" in line


def test_a_file_is_made_or_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_regular_file(path, "one")
    assert path.read_text() == "one"
    path.chmod(0o600)
    write_regular_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_regular_file(path, b"three", mode=0o640)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_names_of_any_bytes_and_of_the_greatest_length_can_be_written(tmp_path: Path) -> None:
    for name in ("x" * 255, os.fsdecode(b"caf\xe9"), "two\nlines"):
        with suppress(OSError):
            (tmp_path / name).unlink()
        check_can_write(tmp_path / name)
        write_regular_file(tmp_path / name, "written")
        assert (tmp_path / name).read_text() == "written"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere/file", "No such file or directory"),
        ("file/file", "Not a directory"),
        ("x" * 256, "File name too long"),
        ("nul\0", "it is not a path"),
        (".", "it is a directory"),
    ],
)
def test_a_path_where_nothing_can_be_written_is_found_before_the_work(path: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for act in (check_can_write, lambda given: write_regular_file(given, "x")):
        with pytest.raises(OSError, match=why):
            act(tmp_path / path)
    assert os.listdir(tmp_path) == ["file"]


def test_nothing_is_left_of_a_file_that_could_not_be_written_whole(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from baton.core.regular_file import write_regular_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_regular_file(Path(sys.argv[1]), 'x' * 2000)\n"
    )
    path = tmp_path / "file"
    path.write_text("as before")
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert path.read_text() == "as before"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("read", [read_costs, read_expert_load, read_results, read_trace])
def test_a_device_is_no_file_of_costs_loads_results_or_requests(read: Callable[[Path], object]) -> None:
    """Reading /dev/zero would not end."""
    with pytest.raises((ConfigError, InvalidRequest), match=r"not a regular file|a device"):
        read(Path(os.devnull))
