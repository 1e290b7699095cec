"""`baton up`, `demo`, `generate` and `status` on real clusters."""

import asyncio
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from baton.cli.up import EXAMPLE_PROMPT
from baton.client.operators import OperatorClient
from baton.core.errors import BatonError, InvalidRequest, UnknownModel
from baton.protos.v1 import generation_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.protos.v1.generation_pb2_grpc import GenerationStub
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error
from tests.docs.blocks import to_run
from tests.docs.terminal import Started, Terminal
from tests.integration.cluster import DEADLINE_S, LLAMA
from tests.integration.up import BATON as BATON_ALONE
from tests.integration.up import Up, interrupt, start_up
from tests.warm import BATON, run_warm

PROMPT = (
    "Return a list of the names of the attributes of the object, and of its class, and of the classes from which its "
    "class is derived, in the order in which they were defined. If the object has no attributes, the list is empty. "
)
ROOM = 40  # requests at once; `generate` sends more of a file at once
READY = node_status_pb2.PEER_PHASE_READY
RECEIPT = {
    "path", "why", "prefill_node", "decode_node", "prompt_tokens_sent", "bytes_sent", "segments", "transport",
    "queue_s", "prefill_s", "transfer_s", "ttft_s", "total_s",
}  # fmt: skip


def baton(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_warm(BATON, *arguments, folder=folder)


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    started = start_up(
        "--model", str(LLAMA), "--prefill-nodes", "2", "--prefill-kv-cache-layout", "HND", "--prefill-block-size", "8",
        "--decode-kv-cache-layout", "BLNHC", "--decode-block-size", "32",
        # Where a prompt is prefilled does not depend on measured times.
        BATON_LOCAL_POLICY="strict", BATON_MAX_CONCURRENT_REQUESTS=str(ROOM),
    )  # fmt: skip
    try:
        asyncio.run(until_paired(started.gateway))
        yield started
    finally:
        if started.popen.poll() is None:
            interrupt(started)


async def until_paired(gateway: str) -> None:
    """A gateway serves after a few seconds in any case, when slow nodes may not be paired yet."""
    async with asyncio.timeout(DEADLINE_S), OperatorClient(gateway) as client:
        while True:
            nodes = [report.status for report in (await client.cluster_status()).nodes]
            prefills = [node for node in nodes if node.info.role == node_status_pb2.ROLE_PREFILL]
            if len(prefills) == 2 and all(len(node.peers) == 1 and node.peers[0].phase == READY for node in prefills):
                return
            await asyncio.sleep(0.05)


def as_json(up: Up, *arguments: str) -> dict[str, object]:
    finished = baton("generate", "--target", up.gateway, "--json", *arguments)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert isinstance(found, dict)
    return found


def error_line(finished: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on stderr."""
    assert finished.returncode == code, finished.stderr
    assert "Traceback" not in finished.stderr
    lines = [line for line in finished.stderr.splitlines() if line]
    assert len(lines) == 1, finished.stderr
    return lines[0]


def test_up_prints_addresses_and_pids(up: Up) -> None:
    assert set(up.line) == {"gateway", "http", "prefill", "decode", "pids"}
    with urllib.request.urlopen(f"{up.line['http']}/v1/models") as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["llama"]
    assert isinstance(up.line["prefill"], list)
    assert len(up.line["prefill"]) == 2
    assert all(psutil.pid_exists(pid) for pid in up.pids)


def test_the_first_steps_after_the_installation_run_as_documented(up: Up, tmp_path: Path) -> None:
    with Terminal(tmp_path, Started(up.line)) as terminal:
        for block in to_run():
            if block.page == "docs/getting-started.md" and block.heading != "Install":
                terminal.run(block)


def test_generate_streams_text(up: Up) -> None:
    finished = baton("generate", "--target", up.gateway, "--max-tokens", "20", "--temperature", "0", PROMPT)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()
    found = as_json(up, "--max-tokens", "20", "--temperature", "0", PROMPT)
    assert finished.stdout.rstrip("\n") == str(found["text"]).rstrip("\n")


def test_generate_says_that_the_model_ended_at_once(up: Up) -> None:
    """An instruct model often does after a bare question."""
    prompt = "Close the file."
    whole = as_json(up, "--temperature", "0", prompt)
    assert whole["finish_reason"] == "stop"
    line = error_line(baton("generate", "--target", up.gateway, "--temperature", "0", f"{prompt}{whole['text']}"), 0)
    assert line == "baton: the model ended at once, without text; ask it a question with `baton chat`"


def test_json_has_tokens_logprobs_usage_and_receipt(up: Up) -> None:
    new_prompt = f"Nobody has asked this before. {PROMPT}"
    found = as_json(up, "--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--logprobs", "2", new_prompt)
    assert set(found) == {"request_id", "text", "token_ids", "logprobs", "finish_reason", "usage", "receipt"}
    receipt, usage, logprobs = found["receipt"], found["usage"], found["logprobs"]
    assert isinstance(receipt, dict)
    assert isinstance(usage, dict)
    assert isinstance(logprobs, list)
    assert set(receipt) >= RECEIPT
    assert receipt["path"] == "remote"
    assert receipt["transport"] not in ("", "loopback")
    assert usage["completion_tokens"] == 12
    assert found["finish_reason"] == "length"
    assert len(logprobs) == 12
    assert all(len(each["top"]) == 2 for each in logprobs)
    assert all(each["logprob"] == pytest.approx(each["top"][0]["logprob"]) for each in logprobs)  # greedy


def test_a_seed_gives_the_same_text_again(up: Up) -> None:
    sampled = ("--max-tokens", "16", "--temperature", "1", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01")
    one, again, other = (
        as_json(up, *sampled, "--ignore-eos", "--seed", seed, PROMPT)["token_ids"] for seed in ("5", "5", "6")
    )
    assert one == again
    assert one != other


def test_a_prompt_may_be_token_ids(up: Up) -> None:
    found = as_json(up, "--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--token-ids", "5,6,7,8")
    assert isinstance(found["token_ids"], list)
    assert len(found["token_ids"]) == 4
    receipt = found["receipt"]
    assert isinstance(receipt, dict)
    assert receipt["path"] == "remote"  # policy strict
    assert receipt["why"].startswith("prompt prefilled on prefill-")


def test_a_stop_string_ends_the_text(up: Up) -> None:
    whole = str(as_json(up, "--max-tokens", "40", "--temperature", "0", "--ignore-eos", PROMPT)["text"])
    stop = whole[10:14]
    found = as_json(up, "--max-tokens", "40", "--temperature", "0", "--ignore-eos", "--stop", stop, PROMPT)
    assert found["text"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"


def test_a_file_of_prompts_gives_results_in_order(up: Up, tmp_path: Path) -> None:
    prompts = [f"{PROMPT} Number {index}." for index in range(6)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts) + "\n")
    options = ("--max-tokens", "6", "--temperature", "0", "--ignore-eos")
    finished = baton("generate", "--target", up.gateway, "--json", "--file", str(file), *options)
    assert finished.returncode == 0, finished.stderr
    found = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [each["index"] for each in found] == list(range(6))
    assert [each["prompt"] for each in found] == prompts
    assert [each["token_ids"] for each in found] == [as_json(up, *options, prompt)["token_ids"] for prompt in prompts]


@pytest.mark.slow
def test_a_file_may_have_more_prompts_than_there_is_room_for(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"Return the number {index}\n" for index in range(5 * ROOM)))
    finished = baton("generate", "--target", up.gateway, "--json", "--file", str(file), "--max-tokens", "2")
    assert finished.returncode == 0, finished.stderr
    assert len(finished.stdout.splitlines()) == 5 * ROOM


def test_status_names_nodes_and_the_transport_of_each_pair(up: Up) -> None:
    text = baton("status", "--target", up.gateway)
    assert text.returncode == 0, text.stderr
    for word in ("prefill-0", "prefill-1", "decode-0", "HND", "BLNHC", "GB/s"):
        assert word in text.stdout
    assert max(map(len, text.stdout.splitlines())) <= 80
    found = json.loads(baton("status", "--target", up.gateway, "--json").stdout)
    assert "decode-0" in json.dumps(found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-tokens", "4", ""), ("prompt", "empty")),
        (("in Latin-1: \udce9",), ("prompt", "UTF-8")),
        (("--token-ids", "1,99999999"), ("99999999",)),
        (("--max-tokens", "4", "--token-ids", ",".join(["7"] * 5000)), ("5000", "4095")),
    ],
)
def test_wrong_requests_get_one_clear_line(up: Up, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    line = error_line(baton("generate", "--target", up.gateway, *arguments), 1)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--max-tokens", "0", "0 is not allowed; allowed: 1 to"),
        ("--temperature", "nan", "0 (greedy) to 100"),
        ("--top-p", "1.5", "up to 1"),
        ("--no-such-flag", "1", "--no-such-flag"),
    ],
)
def test_wrong_flags_get_one_clear_line_and_exit_code_2(flag: str, value: str, allowed: str) -> None:
    line = error_line(baton("generate", flag, value, "x"), 2)
    assert flag in line
    assert allowed in line


def test_a_target_where_nothing_listens_is_named() -> None:
    line = error_line(baton("generate", "--target", "127.0.0.1:9", "x"), 1)
    assert "127.0.0.1:9" in line


async def failure(gateway: str, request: pb.GenerateRequest) -> BatonError:
    async with connect(gateway) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in GenerationStub(channel).Generate(request):
                pass
    return from_rpc_error(caught.value)


async def test_a_client_that_speaks_grpc_gets_details(up: Up) -> None:
    wrong = pb.GenerateRequest(text="x")
    wrong.sampling.temperature = math.nan
    error = await failure(up.gateway, pb.GenerateRequest(text="x", model="gpt-5"))
    assert isinstance(error, UnknownModel)
    assert error.allowed == ("llama",)
    error = await failure(up.gateway, wrong)
    assert isinstance(error, InvalidRequest)
    assert error.field == "temperature"
    async with connect(up.gateway) as channel:
        stub = GenerationStub(channel)
        models = await stub.ListModels(pb.ListModelsRequest())
        assert [card.name for card in models.models] == ["llama"]
        ids = (await stub.Tokenize(pb.TokenizeRequest(text=PROMPT))).token_ids
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == PROMPT


def test_a_piped_chat_has_one_turn_per_line_and_remembers_them(up: Up) -> None:
    def answers(lines: str) -> list[str]:
        command = [*BATON_ALONE, "chat", "--target", up.gateway, "--max-tokens", "6", "--temperature", "0"]
        finished = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout.split("\n")

    first = "Return the list\n"
    told = answers(f"{first}{first}/reset\n{first}/exit\n{first}")
    assert len(told) >= 4
    alone = "\n".join(answers(first)).strip()
    whole = "\n".join(told).strip()
    assert alone
    # The second turn has a history, the third has none again.
    assert whole.startswith(alone)
    assert whole.endswith(alone)
    assert whole.count(alone) == 2


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves_the_chat(up: Up) -> None:
    terminal, theirs = pty.openpty()
    # It does not end before Ctrl-C, because the terminal holds only a part of it.
    options = ("--max-tokens", "3900", "--ignore-eos", "--temperature", "0")
    command = [*BATON_ALONE, "chat", "--target", up.gateway, *options]
    chat = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        read_until(terminal, b"> ")
        os.write(terminal, b"Return the list\n")
        read_until(terminal, b"list\r\n")
        read_until(terminal, b" ")  # some of the answer
        chat.send_signal(signal.SIGINT)
        read_until(terminal, b"(stopped)")
        read_until(terminal, b"> ")
        os.write(terminal, b"\x04")
        assert chat.wait(DEADLINE_S) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(terminal)


def test_a_chat_in_a_terminal_has_roles_commands_pastes_and_speed(up: Up) -> None:
    terminal, theirs = pty.openpty()
    command = [*BATON_ALONE, "chat", "--target", up.gateway, "--max-tokens", "6", "--ignore-eos", "--temperature", "0"]
    variables = {**os.environ, "TERM": "xterm"}
    chat = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=variables)
    os.close(theirs)

    def said(lines: bytes) -> bytes:
        os.write(terminal, lines)
        return read_until(terminal, b"you> ")

    try:
        greeting = read_until(terminal, b"you> ")
        assert b"/help" in greeting
        assert b"demo model, trained on docstrings" in greeting
        assert b"/clear" in said(b"/help\n")
        first = said(b"Return the list\n")
        assert b"llama>" in first
        assert b"tokens in, 6 out; first after" in first
        assert b"over" in first  # the policy is strict: KV has moved
        one_turn = said(b"first line\nsecond line\n")
        assert one_turn.count(b"llama>") == 1
        assert b"is not a command" in said(b"/nope\n")
        assert b"Return the list" in said(b"\x1b[A\x1b[A\x1b[A\x1b[A\n")  # the line before the paste's two and the last
        assert b"system message set" in said(b"/system Be brief.\n")
        os.write(terminal, b"/quit\n")
        assert chat.wait(DEADLINE_S) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(terminal)


def test_up_shows_a_person_addresses_an_example_and_a_row_for_each_request() -> None:
    terminal, theirs = pty.openpty()
    command = [*BATON_ALONE, "up", "--port", "0", "--http-port", "0", "--model", str(LLAMA)]
    variables = {**os.environ, "TERM": "xterm", "BATON_LOCAL_POLICY": "strict"}
    running = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=variables
    )
    os.close(theirs)
    try:
        shown = read_until(terminal, b"TPOT  output").decode()
        assert "/ui" in shown
        assert "baton generate --target" in shown
        assert " INFO " not in shown
        gateway = re.search(r"gRPC +(\S+)", shown)
        assert gateway is not None
        found = baton("generate", "--target", gateway[1], "--max-tokens", "4", "--ignore-eos", EXAMPLE_PROMPT)
        assert found.returncode == 0, found.stderr
        row = read_until(terminal, b" 4\r\n").decode().split()
        assert row[1:3] == ["prefill-0", "decode-0"]
        assert row[4] == "MiB,"
        running.send_signal(signal.SIGINT)
        read_until(terminal, b"stopped")
        assert running.wait(DEADLINE_S) == 0
    finally:
        running.kill()
        running.wait()
        os.close(terminal)


def test_logprobs_are_shown_as_text(up: Up) -> None:
    finished = baton("generate", "--target", up.gateway, "--max-tokens", "3", "--ignore-eos", "--logprobs", "2", "x")
    assert finished.returncode == 0, finished.stderr
    header, *rows = finished.stdout.splitlines()[-4:]
    assert header.split() == ["logprob", "token", "instead", "of", "it"]
    assert all(float(row.split()[0]) <= 0 for row in rows)


def read_until(terminal: int, wanted: bytes) -> bytes:
    """Reads what the terminal shows up to these bytes, and returns it."""
    shown = b""
    while wanted not in shown:
        assert select.select([terminal], [], [], DEADLINE_S)[0], shown
        shown += os.read(terminal, 1)
    return shown


def test_status_is_shown_again_until_ctrl_c(up: Up) -> None:
    watching = subprocess.Popen(
        [*BATON_ALONE, "status", "--target", up.gateway, "--json", "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    shown = [json.loads(watching.stdout.readline())["gateway"] for _ in range(2)]
    watching.send_signal(signal.SIGINT)
    assert shown[0] == shown[1]
    assert watching.communicate(timeout=DEADLINE_S)[1] == ""
    assert watching.returncode == 0


def test_top_prints_one_frame_into_a_pipe(up: Up) -> None:
    finished = baton("top", "--target", up.gateway)
    assert finished.returncode == 0, finished.stderr
    for word in ("llama", "running", "TTFT", "prefill-0", "prefill-1", "decode-0", "link from", "GB/s"):
        assert word in finished.stdout
    assert "\x1b" not in finished.stdout
    assert "4000" in error_line(baton("top", "--interval", "4000"), 2)
    assert "127.0.0.1:9" in error_line(baton("top", "--once", "--target", "127.0.0.1:9"), 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_top_shows_frames_until_it_is_ended_and_leaves_the_terminal_as_it_was(up: Up, number: int, code: int) -> None:
    terminal, theirs = pty.openpty()
    command = [*BATON_ALONE, "top", "--target", up.gateway, "--interval", "0.2"]
    variables = {**os.environ, "TERM": "xterm"}
    top = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=variables)
    os.close(theirs)
    try:
        read_until(terminal, b"\x1b[?1049h")
        for _ in range(2):
            read_until(terminal, b"decode-0")
        top.send_signal(signal.SIGWINCH)
        read_until(terminal, b"decode-0")
        top.send_signal(number)
        read_until(terminal, b"\x1b[?1049l")
        assert top.wait(DEADLINE_S) == code
    finally:
        top.kill()
        top.wait()
        os.close(terminal)


@pytest.mark.parametrize("role", ["prefill-node", "gateway"])
def test_a_taken_port_is_one_line_before_the_model_is_looked_for(up: Up, role: str) -> None:
    line = error_line(baton(role, "--listen", up.gateway, "--model", "/no/such/model"), 2)
    assert up.gateway in line
    assert "port" in line


def test_up_says_in_one_line_that_its_port_is_taken(up: Up) -> None:
    port = up.gateway.rpartition(":")[2]
    line = error_line(baton("up", "--port", port), 1)
    assert f"port {port} of 127.0.0.1 is in use" in line
    assert "--port" in line


def test_ctrl_c_ends_every_process(up: Up) -> None:
    """This test ends the cluster, so it is the last one that uses it."""
    assert interrupt(up) == 0
    assert not any(psutil.pid_exists(pid) for pid in up.pids)


def test_killing_up_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """With two ranks for each node, and a folder for temporary files that nobody else uses."""
    killed = start_up("--tensor-parallel-size", "2", TMPDIR=str(tmp_path))
    family = psutil.Process(killed.popen.pid).children(recursive=True)
    assert len(family) >= 5  # a gateway, four ranks, and what tries addresses for them
    killed.popen.kill()
    killed.popen.communicate(timeout=DEADLINE_S)
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_S)
    assert alive == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_up_names_a_wrong_setting_in_one_line() -> None:
    finished = baton("up", "--model", str(LLAMA), "--decode-kv-cache-layout", "sideways")
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert "'sideways'" in finished.stderr


@pytest.mark.slow
def test_the_demo_runs_in_a_directory_with_modules_named_like_ours(tmp_path: Path) -> None:
    foreign = "raise SystemExit('imported from the working directory')"
    for name in ("attention.py", "baton/__init__.py", "prefill_node/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(foreign)
    finished = baton("demo", "--max-tokens", "4", folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "KV moved" in finished.stdout
    assert "None" not in finished.stdout
