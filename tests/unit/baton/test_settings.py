"""Settings that are lists or times, the tokenizer of the demo models, and the environment of child processes."""

import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command

from baton.cli import program
from baton.cli.program import new_app
from baton.core.limits import DURATION_S_MIN
from baton.core.sampling import SamplingParams
from baton.core.setting_names import flag, variable
from baton.load.command import bench
from baton.planner.command import plan
from baton.settings.config import DEMO_MODELS, ProcessSettings, tokenizer_file
from baton.settings.environment import child_environment
from baton.settings.gateway_config import GatewaySettings, PickerSettings
from baton.settings.internal import settings_of
from baton.settings.node_config import DecodeSettings, PrefillSettings
from baton.settings.reader import GROUPS, REMOVED, RENAMED, REPLACED, bounds_of, read_settings


def test_a_decode_node_lists_the_dtypes_that_it_accepts() -> None:
    assert read_settings(DecodeSettings, "decode_node", []).converted_kv_dtypes == ()
    given = read_settings(DecodeSettings, "decode_node", ["--kv-convert-from", "bfloat16, float32"])
    assert given.converted_kv_dtypes == ("bfloat16", "float32")


def test_a_prefill_node_accepts_no_other_dtype() -> None:
    assert read_settings(PrefillSettings, "prefill_node", []).converted_kv_dtypes == ()


def test_a_dtype_that_cannot_be_converted_is_refused_with_those_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(DecodeSettings, "decode_node", ["--kv-convert-from", "bfloat16,float8_e4m3fn"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "BATON_KV_CONVERT_FROM (--kv-convert-from)" in line
    assert "float8_e4m3fn cannot be converted; allowed: float32, bfloat16, float16" in line


@pytest.mark.parametrize("value", ["inf", "1e10"])
def test_an_invalid_time_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(DecodeSettings, "decode_node", ["--drain-grace-s", value])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"BATON_DRAIN_GRACE_S (--drain-grace-s) is '{value}'" in line


def test_both_demo_models_have_a_tokenizer() -> None:
    assert all(tokenizer_file(DEMO_MODELS / name).is_file() for name in ("llama", "deepseek"))


def test_a_model_without_a_tokenizer_does_not_get_that_of_the_demo(tmp_path: Path) -> None:
    assert tokenizer_file(tmp_path) == tmp_path / "tokenizer.json"


@pytest.mark.parametrize("python_path", ["", ":"])
def test_a_child_imports_our_modules_and_not_those_of_its_directory(
    python_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "baton" / "gateway").mkdir(parents=True)
    (tmp_path / "baton" / "gateway" / "__init__.py").write_text(
        "raise SystemExit('imported from the working directory')"
    )
    (tmp_path / "attention.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.setenv("PYTHONPATH", python_path)
    done = subprocess.run(
        [sys.executable, "-m", "baton.gateway", "--help"],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


ROLES: list[type[ProcessSettings]] = [PrefillSettings, DecodeSettings, GatewaySettings, PickerSettings]
SETTINGS_MAX = 83  # one more must be worth more than the least useful of these


@pytest.mark.parametrize("cls", ROLES)
def test_every_number_has_a_least_and_a_greatest_value(cls: type[ProcessSettings]) -> None:
    for name, field in settings_of(cls).items():
        if not {int, float} & {field.annotation, *get_args(field.annotation)}:
            continue
        bounds = bounds_of(field)
        assert bounds is not None, name
        least, greatest = bounds
        assert math.isfinite(least), name
        assert math.isfinite(greatest), name
        assert field.default is None or least <= field.default <= greatest, name
        if name.endswith(("_s", "_ms")):
            assert least == 0 or least >= DURATION_S_MIN, name


@pytest.mark.parametrize("value", ["1e-300", "0", "-1", "1e300", "inf", "nan"])
def test_a_number_out_of_range_is_refused_with_the_range(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    for cls in ROLES:
        with pytest.raises(SystemExit) as ended:
            read_settings(cls, "node", ["--drain-grace-s", value])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"(--drain-grace-s) is '{value}'" in line
        assert line.endswith("; allowed: 0.001 to 1000000000")


def test_all_processes_together_have_few_settings_and_each_is_in_one_group_of_the_help() -> None:
    names = {name for cls in ROLES for name in settings_of(cls)}
    grouped = [name for _, group in GROUPS for name in group]
    assert len(names) <= SETTINGS_MAX
    assert sorted(grouped) == sorted(names)


def test_a_value_that_is_no_setting_has_neither_variable_nor_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_SUPERVISOR", "nobody")
    assert read_settings(DecodeSettings, "decode_node", []).supervisor is None
    assert DecodeSettings(num_blocks=3).num_blocks == 3
    with pytest.raises(SystemExit):
        read_settings(DecodeSettings, "decode_node", ["--help"])
    assert "num-blocks" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("queue_s", "use {}max{}queue{}s"),
        ("num_blocks", "use {}kv{}cache{}mib"),
        ("adapter_directory", "use {}adapter"),
        ("stale_s", "leave it out"),
        ("num_hosts", "set NNODES"),
        ("trace_sample", "set OTEL_TRACES_SAMPLER_ARG"),
    ],
)
def test_a_setting_of_an_older_release_is_refused_with_what_to_do(
    name: str, cure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(GatewaySettings, "gateway", [flag(name), "3"])
    assert ended.value.code == 2
    assert f"gateway: {flag(name)} is not a flag; {cure.format('--', '-', '-')}" in capsys.readouterr().err
    monkeypatch.setenv(variable(name), "3")
    with pytest.raises(SystemExit) as ended:
        read_settings(GatewaySettings, "gateway", [])
    assert ended.value.code == 2
    cure = cure.format("BATON_", "_", "_")
    assert capsys.readouterr().err.lower().startswith(f"gateway: {variable(name)} is not a setting; {cure}".lower())


def test_older_names_name_settings_that_exist_and_are_none_themselves() -> None:
    names = {name for cls in ROLES for name in settings_of(cls)}
    assert set(RENAMED.values()) <= names
    assert not (REMOVED | RENAMED.keys() | REPLACED.keys()) & names


def test_every_number_of_a_command_has_a_least_and_a_greatest_value() -> None:
    commands = dict(get_command(program()).commands)  # type: ignore[attr-defined]
    for name, command in (("bench", bench), ("plan", plan)):
        app = new_app()
        app.command()(command)
        commands[name] = get_command(app)
    of_sampling = {field.name for field in fields(SamplingParams)}  # checked by SamplingParams
    found = 0
    for name, command in commands.items():
        for option in command.params:
            about = getattr(option, "type_descriptor", None)
            annotation = None if about is None else about.annotation
            if not {int, float} & {annotation, *get_args(annotation)}:
                continue
            if name in ("generate", "chat") and option.name in of_sampling:
                continue
            found += 1
            assert option.min is not None, (name, option.name)
            assert option.max is not None, (name, option.name)
    assert found > 30
