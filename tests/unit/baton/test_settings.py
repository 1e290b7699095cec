"""Settings whose values are lists of names, and times."""

import pytest

from baton.config import DecodeSettings, PrefillSettings, read_settings


def test_a_decode_node_lists_what_it_takes_in_its_own_dtype() -> None:
    assert read_settings(DecodeSettings, "decode_node", []).converted_kv_dtypes == ()
    given = read_settings(DecodeSettings, "decode_node", ["--kv-convert-from", "bfloat16, float32"])
    assert given.converted_kv_dtypes == ("bfloat16", "float32")


def test_a_prefill_node_takes_nothing() -> None:
    assert read_settings(PrefillSettings, "prefill_node", []).converted_kv_dtypes == ()


def test_what_cannot_be_converted_is_refused_with_what_can(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(DecodeSettings, "decode_node", ["--kv-convert-from", "bfloat16,float8_e4m3fn"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "BATON_KV_CONVERT_FROM (--kv-convert-from)" in line
    assert "float8_e4m3fn cannot be converted; allowed: float32, bfloat16, float16" in line


@pytest.mark.parametrize("value", ["inf", "1e8"])
def test_a_time_between_pings_that_is_none_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(DecodeSettings, "decode_node", ["--keepalive-s", value])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"BATON_KEEPALIVE_S (--keepalive-s) is '{value}'" in line
