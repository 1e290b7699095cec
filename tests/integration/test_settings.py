"""A wrong setting ends a process with one clear line on stderr and exit code 2, never with a traceback."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.cli.processes import module_of
from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from tests.integration.cluster import DEADLINE_S, LLAMA, Machines
from tests.warm import run_warm


def error_line(finished: subprocess.CompletedProcess[str], program: str) -> str:
    """The one line that is not a log line."""
    assert finished.returncode == 2, finished.stderr
    assert "Traceback" not in finished.stderr
    lines = [line for line in finished.stderr.splitlines() if line.startswith(f"{program}:")]
    assert len(lines) == 1, finished.stderr
    return lines[0]


@pytest.mark.parametrize("program", ["prefill_node", "decode_node", "gateway"])
def test_help_lists_flags_and_their_variables(program: str) -> None:
    command = [sys.executable, "-m", module_of(program), "--help"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert finished.returncode == 0
    assert "--drain-grace-s" in finished.stdout
    assert "BATON_BLOCK_SIZE" in finished.stdout


def test_a_block_size_of_zero_is_refused() -> None:
    line = error_line(run_warm("decode_node", BATON_BLOCK_SIZE="0"), "decode_node")
    assert "BATON_BLOCK_SIZE" in line
    assert "'0'" in line
    assert "greater than or equal to 1" in line


def test_a_block_size_that_is_not_a_number_is_refused() -> None:
    line = error_line(run_warm("decode_node", "--block-size", "many"), "decode_node")
    assert "--block-size" in line
    assert "'many'" in line


def test_a_directory_of_kv_that_is_a_file_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    flags = ("--model", tmp_path / "no model", "--host-cache-gib", "1", "--kv-store", f"file://{tmp_path / 'kv'}")
    line = error_line(run_warm("decode_node", *map(str, flags)), "decode_node")
    assert "--kv-store" in line
    assert "give a directory" in line


def test_ranks_that_the_model_cannot_have_are_refused_before_they_start() -> None:
    line = error_line(run_warm("decode_node", "--tensor-parallel-size", "64", prepare=_start_no_process), "decode_node")
    assert "cannot be split over 64 ranks" in line


def _start_no_process() -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError(f"{arguments} was started")

    subprocess.Popen = refuse  # type: ignore[misc, assignment]


@pytest.mark.parametrize("program", ["decode_node", "gateway"])
def test_too_few_files_are_refused(program: str) -> None:
    line = error_line(run_warm(program, prepare=_allow_few_files), program)
    assert "may open 60 files; allowed: at least 128" in line


def _allow_few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))


def test_a_flag_wins_over_its_variable() -> None:
    line = error_line(run_warm("prefill_node", "--block-size", "-3", BATON_BLOCK_SIZE="16"), "prefill_node")
    assert "'-3'" in line


def test_an_unknown_layout_lists_the_known_ones() -> None:
    line = error_line(run_warm("decode_node", "--model", str(LLAMA), BATON_KV_CACHE_LAYOUT="NDH"), "decode_node")
    assert "'NDH'" in line
    for name in ("NHD", "HND", "BLNHC", "BLHNC"):
        assert name in line


def test_an_unknown_dtype_of_the_cache_lists_the_known_ones() -> None:
    line = error_line(run_warm("prefill_node", BATON_KV_CACHE_DTYPE="fp8"), "prefill_node")
    assert "BATON_KV_CACHE_DTYPE (--kv-cache-dtype) is 'fp8'" in line
    for name in ("auto", "fp8_e4m3", "fp8_e5m2"):
        assert f"'{name}'" in line


def test_an_unknown_attention_backend_lists_the_known_ones() -> None:
    flags = ("--model", str(LLAMA), "--attention-backend", "FLASH")
    line = error_line(run_warm("prefill_node", *flags), "prefill_node")
    assert "FLASH" in line
    assert "TORCH_SDPA" in line


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    line = error_line(run_warm("prefill_node", "--model", str(tmp_path / "nowhere")), "prefill_node")
    assert "nowhere" in line


def test_an_unreadable_checkpoint_is_named(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((LLAMA / name).read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    line = error_line(run_warm("decode_node", "--model", str(tmp_path)), "decode_node")
    assert "model.safetensors" in line


def test_an_unknown_architecture_lists_the_known_ones_and_names_the_nearest(tmp_path: Path) -> None:
    config = '{"architectures": ["Qwen4ForCausalLM"], "model_type": "qwen4", "num_attention_heads": 16}'
    (tmp_path / "config.json").write_text(config)
    line = error_line(run_warm("decode_node", "--model", str(tmp_path)), "decode_node")
    assert "Qwen4ForCausalLM" in line
    assert "the nearest supported one is Qwen3" in line
    assert "DeepseekV2ForCausalLM" in line
    assert "LlamaForCausalLM" in line


def test_an_address_without_a_port_is_refused() -> None:
    assert "host:port" in error_line(run_warm("gateway", "--listen", "somewhere", "--decode", "127.0.0.1:1"), "gateway")


def test_a_gateway_needs_decode_nodes() -> None:
    assert "--decode" in error_line(run_warm("gateway"), "gateway")


@pytest.mark.parametrize(("value", "cure"), [("somewhere", "host:port"), ("0.0.0.0:7002", "reach this one")])
@pytest.mark.parametrize("program", ["decode_node", "gateway"])
def test_an_advertised_address_that_cannot_be_reached_is_refused(program: str, value: str, cure: str) -> None:
    line = error_line(run_warm(program, "--advertise", value, "--model", str(LLAMA)), program)
    assert f"BATON_ADVERTISE (--advertise) is '{value}'" in line
    assert cure in line


def test_a_node_that_listens_everywhere_warns_about_the_address_that_it_advertises(
    start: Machines, tmp_path: Path
) -> None:
    start.nodes(("decode", {"listen": "0.0.0.0:0", "insecure": "true"}), outputs=tmp_path)
    deadline_s = time.monotonic() + DEADLINE_S
    while "set an address for other machines with --advertise" not in (tmp_path / "stderr").read_text():
        assert time.monotonic() < deadline_s, (tmp_path / "stderr").read_text()  # a thread writes the log


def test_a_ready_file_that_cannot_be_written_is_named(start: Machines, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "ready.json"
    line = error_line(run_warm("decode_node", "--model", str(LLAMA), "--ready-file", str(nowhere)), "decode_node")
    assert "BATON_READY_FILE (--ready-file)" in line
    (decode,) = start.nodes(("decode", {}))
    flags = ("--decode", decode.address, "--model", str(LLAMA), "--ready-file", str(nowhere))
    assert str(nowhere) in error_line(run_warm("gateway", *flags), "gateway")


def test_variables_that_leave_ucx_no_transport_are_named() -> None:
    line = error_line(run_warm("decode_node", "--model", str(LLAMA), UCX_TLS="none_such"), "decode_node")
    assert "UCX cannot start: No such device" in line
    assert "UCX_TLS" in line


async def test_a_cluster_serves_whatever_proxies_the_environment_names(
    start: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy"):
        for each in (name, name.upper()):
            monkeypatch.setenv(each, "http://127.0.0.1:9")
    nodes = start.nodes(("prefill", {}), ("decode", {}))
    gateway = start.gateway(nodes[:1], nodes[1:])
    async with AsyncClient(gateway.address) as client:
        served = await client.complete(list(range(5, 100)), SamplingParams(max_tokens=4))
    assert served.receipt.path == "remote"
