"""Settings that are lists or times, the tokenizer of the demo models, and the environment of child processes."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from annotated_types import Le

from baton.config import DEMO_MODELS, DecodeSettings, PrefillSettings, ProcessSettings, tokenizer_file
from baton.environment import child_environment
from baton.gateway_config import GatewaySettings, PickerSettings
from baton.settings_reader import misspelled_variables, read_settings


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


@pytest.mark.parametrize("value", ["inf", "1e8"])
def test_an_invalid_time_between_pings_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(DecodeSettings, "decode_node", ["--keepalive-s", value])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"BATON_KEEPALIVE_S (--keepalive-s) is '{value}'" in line


def test_both_demo_models_have_a_tokenizer() -> None:
    assert all(tokenizer_file(DEMO_MODELS / name).is_file() for name in ("llama", "deepseek"))


def test_a_model_without_a_tokenizer_does_not_get_that_of_the_demo(tmp_path: Path) -> None:
    assert tokenizer_file(tmp_path) == tmp_path / "tokenizer.json"


@pytest.mark.parametrize("python_path", ["", ":"])
def test_a_child_imports_our_modules_and_not_those_of_its_directory(
    python_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
    (tmp_path / "models.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.setenv("PYTHONPATH", python_path)
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--help"],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("cls", [PrefillSettings, DecodeSettings, GatewaySettings, PickerSettings])
def test_every_number_has_an_upper_limit(cls: type[ProcessSettings]) -> None:
    numbers = {
        name: field.metadata
        for name, field in cls.model_fields.items()
        if {int, float} & {field.annotation, *get_args(field.annotation)}
    }
    assert [name for name, limits in numbers.items() if not any(isinstance(each, Le) for each in limits)] == []


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--num-blocks", "1" + "0" * 30),
        ("--num-blocks", "1" + "0" * 5000),
        ("--threads", "1000000000000"),
        ("--staging-slots", "10000000000000"),
        ("--kv-cache-mib", "10000000000000000000"),
        ("--max-waiting", "10000000000000000000"),
        ("--lease-s", "1e300"),
    ],
)
def test_a_number_that_nothing_could_hold_is_one_short_line(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(DecodeSettings, "decode_node", [flag, value])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"({flag}) is '1" in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("BATON_BLOKSIZE", "BATON_BLOCK_SIZE"),
        ("BATON_PREFIL", "BATON_PREFILL"),
        ("BATON_TTFT", "BATON_TTFT_MS"),
        ("BATON_CACHE_LAYOUT", "BATON_KV_CACHE_LAYOUT"),
    ],
)
def test_a_misspelled_variable_is_refused_with_the_name_that_was_meant(
    name: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "32")
    with pytest.raises(SystemExit) as ended:
        read_settings(DecodeSettings, "decode_node", [])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"decode_node: {name} is no setting; did you mean {nearest}?\n"


@pytest.mark.parametrize(
    "name",
    [
        "VERSION",
        "HOME",
        "LOG",
        "LOG_DIR",
        "LOG_FILE",
        "LOG_FORMAT",
        "DEBUG",
        "ENV",
        "CONFIG",
        "CACHE_DIR",
        "IMAGE",
        "IMAGE_TAG",
        "PORT",
        "HOST",
        "URL",
        "ENDPOINT",
        "TOKEN",
        "NODE_NAME",
        "POD_NAME",
        "POD_IP",
        "MODEL_PATH",
        "MODEL_CACHE",
        "GATEWAY",
        "GATEWAY_URL",
        "PREFILL_URL",
        "DECODE_URL",
        "PREFILL_REPLICAS",
        "DECODE_NODES",
        "HTTP_PORT",
        "METRICS_PORT",
        "WORKER_ID",
        "DEVICE_ID",
        "API_TOKEN",
        "API_URL",
        "JWT_SECRET",
        "CERT_DIR",
        "TEST",
        "PROFILE",
    ],
)
def test_names_that_users_have_for_their_own_purposes_are_not_misspelled(name: str) -> None:
    assert misspelled_variables({f"BATON_{name}": "x"}) == {}


@pytest.mark.parametrize(
    "name", ["BATON_GATEWAY_SERVICE_HOST", "BATON_GATEWAY_PORT_7000_TCP", "BATON_DECODE_PORT", "BATON_WORKERS"]
)
def test_variables_of_kubernetes_and_of_other_processes_are_none_of_a_nodes_business(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:7000")
    assert read_settings(DecodeSettings, "decode_node", []).block_size == 16
