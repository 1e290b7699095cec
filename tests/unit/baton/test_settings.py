"""Settings that are lists or times, the tokenizer of the demo models, and the environment of child processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.config import (
    DEMO_MODELS,
    DecodeSettings,
    PrefillSettings,
    child_environment,
    read_settings,
    tokenizer_file,
)


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
