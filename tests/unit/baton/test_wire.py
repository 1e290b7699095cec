"""The .proto files follow buf's rules, and a change that older processes or clients would misread is refused."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[3]
PROTOS = ROOT / "protos"
RECORDED = PROTOS / "wire.binpb"
TRACED = 30  # fields of traced requests have numbers from here on


def buf(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    program = Path(sysconfig.get_path("scripts")) / "buf"
    return subprocess.run([program, *arguments], capture_output=True, timeout=300, check=False)


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    """A copy of the .proto files to change."""
    copy = tmp_path / "protos"
    shutil.copytree(PROTOS, copy, ignore=shutil.ignore_patterns("*.py*", "*.binpb"))
    return copy


def change(protos: Path, file: str, old: str, new: str) -> None:
    (path,) = (protos / "baton").rglob(file)
    text, count = re.subn(old, new, path.read_text())
    assert count, f"{file} has no {old!r}"
    path.write_text(text)


def refusal(protos: Path) -> str:
    """What `buf breaking` reports for these files against the recorded wire; empty when it accepts them."""
    done = buf("breaking", protos, "--against", RECORDED)
    assert done.returncode in (0, 100), done.stderr.decode()
    assert (done.returncode == 0) == (done.stdout == b"")
    return done.stdout.decode()


def test_the_files_follow_the_standard_rules() -> None:
    assert buf("lint", PROTOS).stdout == b""


def test_the_recorded_wire_is_that_of_the_files() -> None:
    built = buf("build", PROTOS, "--exclude-source-info", "--output", "-")
    assert built.returncode == 0, built.stderr.decode()
    assert built.stdout == RECORDED.read_bytes(), "run `make wire`"


def files() -> list[descriptor_pb2.FileDescriptorProto]:
    recorded = descriptor_pb2.FileDescriptorSet.FromString(RECORDED.read_bytes())
    return [file for file in recorded.file if file.package.startswith("baton.")]


def test_every_number_below_those_of_traced_requests_is_used_or_reserved() -> None:
    skipped = {
        f"{file.name} {message.name}": numbers
        for file in files()
        for message in file.message_type
        if (numbers := _skipped(message))
    }
    assert skipped == {}


def _skipped(message: descriptor_pb2.DescriptorProto) -> set[int]:
    used = {field.number for field in message.field if field.number < TRACED}
    reserved = {number for each in message.reserved_range for number in range(each.start, each.end)}
    return set(range(1, max(used, default=0))) - used - reserved


def test_every_file_names_its_package_for_go_java_and_c_sharp() -> None:
    for file in files():
        options = file.options
        assert options.go_package, file.name
        assert (options.java_package, options.java_multiple_files) == (file.package, True)
        assert options.csharp_namespace.lower() == file.package, file.name


def test_public_files_import_nothing_internal() -> None:
    for file in files():
        if file.package == "baton.v1":
            assert [name for name in file.dependency if "internal" in name] == [], file.name


def test_a_new_field_and_a_new_message_break_nothing(protos: Path) -> None:
    added = "message Note {\n  string text = 1;\n}\n\nmessage Ticket {\n  Note note = 99;"
    change(protos, "lease.proto", "message Ticket {", added)
    assert refusal(protos) == ""


def test_a_field_may_go_if_its_number_and_name_are_reserved(protos: Path) -> None:
    change(protos, "lease.proto", r"  uint32 resume_at = 6;", '  reserved 6;\n  reserved "resume_at";')
    assert refusal(protos) == ""


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        pytest.param("lease.proto", "uint32 resume_at = 6;", "uint32 resume_at = 99;", "resume_at", id="renumbered"),
        pytest.param("lease.proto", "  uint32 resume_at = 6;", "", "resume_at", id="removed without reserving"),
        pytest.param("lease.proto", "uint32 resume_at = 6;", "uint32 skip = 6;", '"skip"', id="number used again"),
        pytest.param("lease.proto", "uint32 resume_at = 6;", "string resume_at = 6;", "string", id="other type"),
        pytest.param("common.proto", "PATH_LOCAL = 2;", "PATH_LOCAL = 99;", "PATH_LOCAL", id="enum value renumbered"),
        pytest.param("decode.proto", "PairConnected", "Done", "PairConnected", id="message renamed"),
        pytest.param("decode.proto", "service Decode", "service DecodeService", '"Decode"', id="service renamed"),
        pytest.param("node.proto", r"  rpc Drain\(.*\n", "", '"Drain"', id="rpc removed"),
        pytest.param("node.proto", r"rpc Describe\(", "rpc Look(", '"Describe"', id="rpc renamed"),
        pytest.param(
            "node.proto",
            r"returns \(stream baton.v1.NodeStatus\)",
            "returns (baton.v1.NodeStatus)",
            "stream",
            id="no stream",
        ),
    ],
)
def test_a_change_that_breaks_the_wire_is_refused(protos: Path, file: str, old: str, new: str, named: str) -> None:
    change(protos, file, old, new)
    assert named in refusal(protos)


def test_a_number_that_was_reserved_stays_so(protos: Path, tmp_path: Path) -> None:
    change(protos, "lease.proto", r"  uint32 resume_at = 6;", '  reserved 6;\n  reserved "resume_at";')
    recorded = tmp_path / "wire.binpb"
    assert buf("build", protos, "--output", recorded).returncode == 0
    change(protos, "lease.proto", r'  reserved 6;\n  reserved "resume_at";', "  string note = 6;")
    done = buf("breaking", protos, "--against", recorded)
    assert done.returncode == 100
    assert b"reserved" in done.stdout
