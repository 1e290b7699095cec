"""What --help shows on a terminal of 80 columns, and what a wrong flag of a role says."""

import sys

import pytest
import typer

from baton.cli import program
from baton.cli.program import new_app, run
from baton.core.errors import ConfigError
from baton.load.command import bench
from baton.planner.command import plan
from baton.settings.gateway_config import GatewaySettings
from baton.settings.node_config import DecodeSettings
from baton.settings.reader import fail, read_settings

_PASSED_ON = {"prefill-node", "decode-node", "gateway", "picker", "bench", "plan"}


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def _shown(app: typer.Typer, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    app([*arguments, "--help"], prog_name="baton", standalone_mode=False)
    return capsys.readouterr().out


def test_what_each_command_does_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _shown(program(), capsys=capsys).partition("Use a model:\n")[2].splitlines()
    listed = [line for line in shown if line.startswith("  ")]
    commands = typer.main.get_command(program()).commands  # type: ignore[attr-defined]
    assert sorted(line.split()[0] for line in listed) == sorted(commands)
    assert [line for line in shown if line.endswith(":")] == [
        "Run one process:",
        "Operate a cluster:",
        "Prepare and measure:",
    ]
    assert [line for line in listed if line.endswith("...")] == []


@pytest.mark.parametrize("name", sorted(set(typer.main.get_command(program()).commands) - _PASSED_ON))  # type: ignore[attr-defined]
def test_every_flag_of_a_command_is_shown_whole(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _shown(program(), name, capsys=capsys)
    command = typer.main.get_command(program()).commands[name]  # type: ignore[attr-defined]
    flags = [option for each in command.params for option in each.opts if option.startswith("--")]
    assert [flag for flag in flags if flag not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (("up", "--queue-s", "3"), "set BATON_MAX_QUEUE_S"),
        (("up", "--num-blocks=3"), "set BATON_KV_CACHE_MIB"),
        (("up", "--staging-slots", "3"), "leave it out: this release measures it or keeps it constant"),
        (("up", "--max-queue-s", "3"), "set BATON_MAX_QUEUE_S"),
        (("up", "--prefill", "2"), "use --prefill-nodes"),
        (("chat", "--tls-ca", "ca.pem"), "use --client-ca"),
    ],
)
def test_a_flag_of_an_older_release_or_a_setting_names_what_to_use(
    arguments: tuple[str, ...], cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(program(), arguments, "baton")
    assert ended.value.code == 2
    flag = arguments[1].partition("=")[0]
    command = f"baton {arguments[0]}"
    assert capsys.readouterr().err == f"baton: {flag} is not a flag of `{command}`; {cure}; see `{command} --help`\n"


def test_a_flag_that_is_missing_from_an_empty_command_line_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    app = new_app()
    app.command()(plan)
    with pytest.raises(SystemExit) as ended:
        run(app, [], "baton plan")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "baton: Missing option '--model'; see `baton plan --help`\n"


@pytest.mark.parametrize("function", [bench, plan], ids=lambda function: function.__name__)
def test_every_flag_of_bench_and_plan_is_shown_whole(function: object, capsys: pytest.CaptureFixture[str]) -> None:
    app = new_app()
    app.command()(function)  # type: ignore[type-var]
    shown = _shown(app, capsys=capsys)
    command = typer.main.get_command(app)
    flags = [option for each in command.params for option in each.opts if option.startswith("--")]
    assert [flag for flag in flags if flag not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--listn", "x"], "decode_node: --listn is not a flag; did you mean --listen?; --help shows all flags\n"),
        (
            ["--gap-factor=2"],
            "decode_node: --gap-factor is a flag of a gateway, not of decode_node; --help shows all flags\n",
        ),
        (["nonsense"], "decode_node: nonsense is not a flag; --help shows all flags\n"),
        (["--listen"], "decode_node: argument --listen: expected one argument; --help shows all flags\n"),
    ],
)
def test_a_wrong_flag_of_a_role_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(DecodeSettings, "decode_node", arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == line


def test_a_setting_that_proves_wrong_later_has_the_names_that_its_user_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "decode" in GatewaySettings.model_fields
    with pytest.raises(SystemExit):
        fail("gateway", ConfigError("decode is 'x'", field="decode", value="x", allowed=("host:port",)))
    assert capsys.readouterr().err == "gateway: BATON_DECODE (--decode) is 'x'; allowed: host:port\n"


def test_a_line_is_one_write_so_that_lines_of_several_processes_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", written.append)
    with pytest.raises(SystemExit):
        fail("gateway", ConfigError("no"))
    assert written == ["gateway: no\n"]


def test_the_flags_of_bench_are_in_groups_and_those_of_a_role_too(capsys: pytest.CaptureFixture[str]) -> None:
    app = new_app()
    app.command()(bench)
    assert "\nGoals:\n  --slo" in _shown(app, capsys=capsys)
    with pytest.raises(SystemExit):
        read_settings(GatewaySettings, "gateway", ["--help"])
    titles = [line for line in capsys.readouterr().out.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles[1:3] == ["nodes and model:", "addresses:"]
    assert titles[-1] == "logs, traces, end:"
