"""Flags, exit codes and output of the command line. tests/integration/test_cli.py has the rest, on real processes."""

import io
import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from baton.cli import main
from baton.cli.generate import logprob_table, to_json
from baton.cli.local_cluster import _devices
from baton.cli.receipt import receipt_lines
from baton.cli.status_json import to_json as status_to_json
from baton.cli.status_tables import render
from baton.client.outputs import Completion
from baton.core.types import FinishReason, LoadedTokens, Receipt, TokenOutput, Usage
from baton.core.types import Path as Way
from baton.core.version import __version__
from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.settings.environment import ranks_of_each_node, visible_gpus
from bench.__main__ import main as bench

RECEIPT = Receipt(
    path=Way.REMOTE,
    why="prompt prefilled on prefill-0",
    prefill_node="prefill-0",
    decode_node="decode-0",
    prompt_tokens_sent=84,
    bytes_sent=4096,
    segments=2,
    transport="cma",
    queue_s=0.0,
    prefill_s=0.1,
    transfer_s=0.002,
    ttft_s=0.2,
    total_s=1.2,
    attempts=1,
    prefill_cached_tokens=0,
    segment_bytes=2048,
    kv_converted="bfloat16 to float8_e4m3fn",
    layer_groups=3,
    request_id="zip-1",
)
USAGE = Usage(prompt_tokens=84, completion_tokens=11, cached_tokens=0)


@pytest.fixture
def unused_address() -> Iterator[str]:
    """An address without a listener."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """The exit code of `baton` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "-1", "x"], "--temperature"),
        (["--temperature", "nan", "x"], "--temperature"),
        (["--top-p", "0", "x"], "--top-p"),
        (["--max-tokens", "0", "x"], "--max-tokens"),
        (["--max-tokens", "many", "x"], "--max-tokens"),
        (["--timeout", "0", "x"], "--timeout"),
        (["--token-ids", "1,b"], "--token-ids"),
        (["--token-ids", "1,-2"], "--token-ids"),
        (["--token-ids", "1", "x"], "PROMPT"),
        (["--file", "/does/not/exist"], "--file"),
        (["--nonsense", "x"], "--nonsense"),
        ([], "PROMPT"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert run(monkeypatch, "generate", *arguments) == 2
    line = capsys.readouterr().err
    assert named in line
    assert line.count("\n") == 1


def test_the_version_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"baton {__version__}\n"


@pytest.mark.parametrize("name", ["nosuch", "attentions"])
def test_a_benchmark_that_does_not_exist_is_an_error_with_the_list(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench([name])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert repr(name) in line
    assert "transport, cache_to_cache" in line


@pytest.mark.parametrize(
    "arguments", [["generate", "x"], ["generate", "--json", "x"], ["status"], ["status", "--json"]]
)
def test_an_unreachable_gateway_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unused_address: str, arguments: list[str]
) -> None:
    assert run(monkeypatch, arguments[0], "--target", unused_address, *arguments[1:]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"baton: cannot reach {unused_address}")
    assert shown.err.count("\n") == 1


def test_each_failed_prompt_of_a_file_has_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unused_address: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    assert run(monkeypatch, "generate", "--target", unused_address, "--file", str(file), "--json") == 1
    shown = capsys.readouterr()
    entries = [json.loads(line) for line in shown.out.splitlines()]
    assert [(entry["index"], entry["prompt"]) for entry in entries] == [(0, "one"), (1, "two")]
    assert all("cannot reach" in entry["error"]["message"] for entry in entries)
    assert "prompt 1: cannot reach" in shown.err
    assert "prompt 2: cannot reach" in shown.err


def test_help_exits_with_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 0
    assert run(monkeypatch, "generate", "--help") == 0
    assert "generate" in capsys.readouterr().out


def test_a_completion_is_one_json_object() -> None:
    tokens = (TokenOutput(7, 0, -0.5, ((7, -0.5), (8, -1.5))), TokenOutput(9, 1, -0.25))
    printed = to_json(Completion("ab", tokens, FinishReason.STOP, "", USAGE, RECEIPT, request_id="zip-1"))
    assert printed["request_id"] == "zip-1"
    assert set(printed) == {"request_id", "text", "token_ids", "logprobs", "finish_reason", "usage", "receipt"}
    assert (printed["text"], printed["token_ids"], printed["finish_reason"]) == ("ab", [7, 9], "stop")
    assert printed["logprobs"] == [
        {
            "token_id": 7,
            "logprob": -0.5,
            "top": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.5}],
        },
        {"token_id": 9, "logprob": -0.25, "top": []},
    ]
    assert json.loads(json.dumps(printed))["receipt"]["path"] == "remote"


def test_json_without_logprobs_has_null() -> None:
    tokens = (TokenOutput(7, 0),)
    assert to_json(Completion("a", tokens, FinishReason.LENGTH, "", USAGE, RECEIPT))["logprobs"] is None


def test_a_receipt_has_nodes_transfer_and_times_in_milliseconds() -> None:
    shown = dict(receipt_lines(USAGE, RECEIPT))
    assert shown == {
        "path": "remote: prompt prefilled on prefill-0",
        "prompt": "84 tokens, prefilled on prefill-0",
        "output": "11 tokens, decoded on decode-0",
        "KV moved": "0.00391 MiB of 84 tokens, prefill-0 to decode-0, in 2 segment(s) over cma",
        "transfer": "complete 2.0 ms after the first token",
        "overlap": "each chunk was sent in 3 groups of layers, while later layers computed",
        "converted": "bfloat16 to float8_e4m3fn",
        "times": "queue 0.0 ms, prefill 100 ms, first token 200 ms, whole answer 1,200 ms",
        "speed": "10 tokens/s after the first token",
        "request": "zip-1",
    }


def test_a_receipt_says_that_nothing_moved() -> None:
    local = replace(RECEIPT, path=Way.LOCAL, prefill_node="", bytes_sent=0)
    shown = dict(receipt_lines(USAGE, local))
    assert shown["KV moved"] == "nothing: one node served the whole request"
    assert shown["prompt"] == "84 tokens, prefilled on decode-0"
    assert "transfer" not in shown


def test_a_table_of_logprobs_has_texts_and_the_other_most_probable_tokens() -> None:
    tokens = [TokenOutput(5, 0, -0.25, ((5, -0.25), (7, -1.5))), TokenOutput(9, 1, -12.5, ((7, -0.1), (5, -3.0)))]
    assert logprob_table(tokens, {5: " the", 7: "\n\x1b[2J", 9: "x" * 40}).splitlines() == [
        "logprob  token                     instead of it",
        "  -0.25  ' the'                    '\\n\\x1b[2J' -1.50",
        " -12.50  'xxxxxxxxxxxxxxxxxxx...'  '\\n\\x1b[2J' -0.10  ' the' -3.00",
    ]


def test_json_of_a_status_has_why_a_pair_was_refused() -> None:
    mismatch = node_status_pb2.Mismatch(field="dtype", ours="float32", theirs="bfloat16", cure="start both alike")
    peer = node_status_pb2.PeerState(name="decode-0", phase=node_status_pb2.PEER_PHASE_REFUSED, mismatches=[mismatch])
    info = node_status_pb2.NodeInfo(name="prefill-0", role=node_status_pb2.ROLE_PREFILL, incarnation=2**64 - 1)
    status = node_status_pb2.NodeStatus(info=info, blocks_total=8, blocks_free=3, peers=[peer])
    report = operations_pb2.NodeReport(address="127.0.0.1:5", reachable=True, status=status)
    printed = json.loads(json.dumps(status_to_json(operations_pb2.ClusterStatusResponse(nodes=[report]))))
    [node] = printed["nodes"]
    assert (node["role"], node["blocks_used"], node["incarnation"]) == ("prefill", 5, "f" * 16)
    assert node["peers"][0]["state"] == "refused"
    assert node["peers"][0]["mismatches"] == [
        {"field": "dtype", "ours": "float32", "theirs": "bfloat16", "cure": "start both alike"}
    ]


def test_json_of_a_status_has_what_steps_cost() -> None:
    costs = node_status_pb2.StepCosts(points=[node_status_pb2.TokensCost(tokens=16, seconds=0.25)], pair_s=0.5)
    status = node_status_pb2.NodeStatus(backlog_s=1.5, decode_rows=3, context_tokens=700, step_costs=costs)
    reports = [operations_pb2.NodeReport(status=each) for each in (status, node_status_pb2.NodeStatus())]
    printed = json.loads(json.dumps(status_to_json(operations_pb2.ClusterStatusResponse(nodes=reports))))
    known, unknown = printed["nodes"]
    assert (known["backlog_s"], known["decode_rows"], known["context_tokens"]) == (1.5, 3, 700)
    assert known["step_costs"] == {
        "points": [{"tokens": 16, "seconds": 0.25}],
        "key_s": 0.0,
        "pair_s": 0.5,
        "decode_row_s": 0.0,
        "prompt_step_s": 0.0,
    }
    assert unknown["step_costs"] is None


def test_a_status_has_the_adapters_of_nodes() -> None:
    status = node_status_pb2.NodeStatus(adapters=[node_status_pb2.Adapter(name="sql", revision="0123456789abcdef")])
    status.info.name = status.info.model.name = "decode-0"
    cluster = operations_pb2.ClusterStatusResponse(nodes=[operations_pb2.NodeReport(reachable=True, status=status)])
    [node] = json.loads(json.dumps(status_to_json(cluster)))["nodes"]
    assert node["adapters"] == [{"name": "sql", "revision": "0123456789abcdef"}]
    written = io.StringIO()
    Console(file=written, width=80).print(render(cluster))
    assert "decode-0: adapters sql (0123456789ab)" in written.getvalue()


def test_a_status_has_the_first_adapters_of_a_node_with_many() -> None:
    adapters = [node_status_pb2.Adapter(name=f"a{number:03}" + 500 * "n", revision="0" * 64) for number in range(200)]
    status = node_status_pb2.NodeStatus(adapters=adapters)
    status.info.name, status.info.model.name = "decode-0", "m"
    cluster = operations_pb2.ClusterStatusResponse(nodes=[operations_pb2.NodeReport(reachable=True, status=status)])
    written = io.StringIO()
    Console(file=written, width=10_000).print(render(cluster))
    (line,) = [line for line in written.getvalue().splitlines() if "adapters" in line]
    assert line.rstrip().endswith("and 184 more")
    assert "a015nnn" in line
    assert len(line.rstrip()) < 16 * 100
    nodes = status_to_json(cluster)["nodes"]
    assert isinstance(nodes, list)
    assert len(nodes[0]["adapters"]) == 200


def test_a_status_says_how_evenly_ranks_share_the_experts() -> None:
    balance = node_status_pb2.ExpertBalance(
        redundant_experts=32, rank_tokens=[12, 10, 14, 11], imbalance_mean=1.25, imbalance_max=1.5
    )
    nodes = []
    for name, each in (
        ("decode-0", balance),
        ("decode-1", node_status_pb2.ExpertBalance(rank_tokens=[0, 0])),
        ("d", None),
    ):
        status = node_status_pb2.NodeStatus(expert_balance=each)
        status.info.name = status.info.model.name = name
        nodes.append(operations_pb2.NodeReport(reachable=True, status=status))
    cluster = operations_pb2.ClusterStatusResponse(nodes=nodes)
    printed = json.loads(json.dumps(status_to_json(cluster)))["nodes"]
    assert printed[0]["expert_balance"] == {
        "redundant_experts": 32,
        "rank_tokens": [12, 10, 14, 11],
        "imbalance_mean": 1.25,
        "imbalance_max": 1.5,
    }
    assert printed[2]["expert_balance"] is None
    written = io.StringIO()
    Console(file=written, width=80).print(render(cluster))
    shown = written.getvalue()
    assert "\n  experts: 21 to 30 % a rank; busiest 1.25 x mean, at worst 1.50 x; 32 redundant\n" in shown
    assert "decode-1: experts: whole ones on each rank, no tokens yet" in shown


def test_the_nodes_of_a_cluster_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert visible_gpus() == 2
    assert list(_devices(2, visible_gpus())) == [["--device", "cuda:0"], ["--device", "cuda:1"]]
    first, second, third = _devices(3, 2)
    assert first == third == ["--device", "cuda:0", "--gpu-memory-fraction", "0.45"]
    assert second[1] == "cuda:1"


def test_a_status_with_large_numbers_fits_80_columns() -> None:
    pair = node_status_pb2.PeerState(
        name="decode-0",
        phase=node_status_pb2.PEER_PHASE_READY,
        transport="cuda_ipc",
        gigabytes_per_s=142.31,
        latency_s=12e-6,
        bytes_total=123456 << 20,
        segments_total=123456,
        kv_converted="bfloat16 to float8_e4m3fn",
    )
    nodes = []
    for role, name, peers in (
        (node_status_pb2.ROLE_PREFILL, "prefill-0", [pair]),
        (node_status_pb2.ROLE_DECODE, "decode-0", []),
    ):
        info = node_status_pb2.NodeInfo(name=name, role=role)
        info.model.name = "meta-llama/Llama-3.1-8B-Instruct"
        status = node_status_pb2.NodeStatus(info=info, blocks_total=123456, requests_running=256, peers=peers)
        status.max_batch_tokens, status.max_batch_requests = 4096, 512
        status.backlog_s, status.decode_rows = 12.35, 512
        nodes.append(operations_pb2.NodeReport(address="10.123.123.123:7001", reachable=True, status=status))
    written = io.StringIO()
    console = Console(file=written, width=80)
    console.print(render(operations_pb2.ClusterStatusResponse(gateway="gateway@127.0.0.1:7000", nodes=nodes)))
    shown = written.getvalue()
    for whole in ("123456/123456", "10.123.123.123:7001", "cuda_ipc", "142.31", "bfloat16 to float8_e4m3fn"):
        assert whole in shown
    assert (
        "prefill-0, decode-0:\n  up to 4096 tokens, 512 requests a step; 512 decoding; 12.35 s of prompts wait" in shown
    )
    # Its rows are one line each.
    assert sum(line.startswith("prefill-0") for line in shown.splitlines()) == 5


def test_names_of_nodes_do_not_reach_the_terminal_as_codes() -> None:
    report = operations_pb2.NodeReport(address="\x1b]0;a\x07", reachable=False, detail="\x1b[2J")
    report.status.info.name = "\x1b[31mred"
    cluster = operations_pb2.ClusterStatusResponse(gateway="\u202eg", nodes=[report])
    written = io.StringIO()
    Console(file=written, width=200).print(render(cluster))
    assert all(character.isprintable() or character == "\n" for character in written.getvalue())
    assert r"\x1b[31mred" in written.getvalue()
    assert cluster.gateway == "\u202eg"


def test_a_status_says_in_one_line_what_is_mixed() -> None:
    reports = []
    for name, version, weights in (("prefill-0", "0.1", "a"), ("decode-0", "0.2", "b"), ("decode-1", "0.2", "a")):
        info = node_status_pb2.NodeInfo(name=name, package_version=version)
        info.model.name, info.model.weights_digest, info.model.revision_name = "m", weights, f"main-{weights}"
        reports.append(operations_pb2.NodeReport(reachable=True, status=node_status_pb2.NodeStatus(info=info)))
    cluster = operations_pb2.ClusterStatusResponse(gateway="g", package_version="0.2", nodes=reports)
    written = io.StringIO()
    Console(file=written, width=200).print(render(cluster))
    shown = written.getvalue()
    (mixed,) = [line for line in shown.splitlines() if line.startswith("mixed")]
    assert mixed.rstrip() == status_to_json(cluster)["mixed"]
    assert mixed.startswith("mixed versions: 0.2 on g and decode-0 and decode-1, 0.1 on prefill-0; mixed revisions")
    assert "g (0.2): " in shown
    assert "decode-0: Baton 0.2, weights main-b (" in shown
    del cluster.nodes[1]
    cluster.nodes[0].reachable = False
    assert status_to_json(cluster)["mixed"] == ""


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_cluster_without_gpus_leaves_the_device_to_its_default(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert list(_devices(2, visible_gpus())) == [[], []]


def test_a_node_of_several_ranks_gets_as_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TENSOR_PARALLEL_SIZE", "2")
    assert ranks_of_each_node() == 2
    assert list(_devices(2, 4, ranks=2)) == [["--device", "cuda:0"], ["--device", "cuda:2"]]
    first, second = _devices(2, 3, ranks=2)
    assert first == second == ["--device", "cuda:0", "--gpu-memory-fraction", "0.45"]
    monkeypatch.setenv("BATON_TENSOR_PARALLEL_SIZE", "many")
    assert ranks_of_each_node() == 1


def test_device_settings_of_the_environment_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_DEVICE", "cpu")
    monkeypatch.setenv("BATON_GPU_MEMORY_FRACTION", "0.3")
    assert list(_devices(2, 1)) == [[], []]


def test_a_receipt_says_from_where_cached_tokens_were_read() -> None:
    usage = replace(USAGE, cached_tokens=80)
    assert "read" not in dict(receipt_lines(usage, RECEIPT))["prompt"]
    receipt = replace(RECEIPT, prefill_loaded=LoadedTokens(host=48, peer=16), decode_loaded=LoadedTokens(file=32))
    shown = dict(receipt_lines(usage, receipt))["prompt"]
    assert shown.startswith("84 tokens, 80 of them cached, of these read 48 from host memory, 16 from other nodes, ")


def test_a_receipt_says_how_many_draft_tokens_were_right() -> None:
    drafted = replace(RECEIPT, drafted_tokens=20, accepted_tokens=15)
    assert dict(receipt_lines(USAGE, drafted))["drafts"] == "15 of 20 draft tokens accepted"
