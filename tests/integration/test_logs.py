"""Real processes log a failed request with its id and the cause, at the gateway and on the node, and log nothing about
a served one. No process waits for a reader of its log."""

import fcntl
import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from tests.integration.broken_steps import BAD_TOKEN, break_steps
from tests.integration.cluster import Flags, machines

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"


def complete(url: str | None, request_id: str, token: int) -> int:
    """The status of a completion."""
    body = json.dumps({"model": "llama", "prompt": [token] * 8, "max_tokens": 4}).encode()
    headers = {"content-type": "application/json", "x-request-id": request_id}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_failed_request_is_found_by_its_id_at_the_door_and_on_its_node(tmp_path: Path) -> None:
    of_node, of_gateway = tmp_path / "node", tmp_path / "gateway"
    of_node.mkdir()
    of_gateway.mkdir()
    with machines() as started:
        flags: Flags = {"log_format": "json"}
        nodes = started.nodes(("decode", flags), prepare=break_steps, outputs=of_node)
        gateway = started.gateway([], nodes, local_policy="local", max_attempts=1, outputs=of_gateway)
        assert complete(gateway.http, "served", 5) == 200
        assert complete(gateway.http, "broken", BAD_TOKEN) == 500
        assert complete(gateway.http, "mistaken", 10**9) == 400
        assert started.end(gateway) == 0
        assert started.end(nodes[0]) == 0
    records = [json.loads(line) for line in (of_node / "stderr").read_text().splitlines()]
    assert {record["role"] for record in records} == {"decode_node"}
    assert all(re.fullmatch(TIME, record["time"]) for record in records)
    (failed,) = [record for record in records if "request_id" in record]
    assert (failed["request_id"], failed["level"], failed["reason"]) == ("broken", "warning", "INTERNAL")
    assert failed["message"].startswith("request failed here: ")
    (step,) = [record for record in records if record["message"] == "an engine step failed"]
    assert "RuntimeError: the kernel broke" in step["lines"]
    lines = (of_gateway / "stderr").read_text().splitlines()
    assert all(re.match(rf"{TIME} gateway \S* ?(INFO|WARNING) ", line) for line in lines), lines
    (line,) = [line for line in lines if "request_id=" in line]
    assert " WARNING request failed: " in line
    assert " request_id=broken " in line
    assert " reason=INTERNAL " in line


def test_a_log_that_nobody_reads_stops_no_process_and_loses_no_line(tmp_path: Path) -> None:
    pipes = {}
    for name in ("node", "gateway"):
        (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / name / "stderr")
        pipes[name] = os.open(tmp_path / name / "stderr", os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(pipes[name], fcntl.F_SETPIPE_SZ, 4096)
    with machines() as started:
        nodes = started.nodes(("decode", {"log_level": "debug"}), outputs=tmp_path / "node")
        gateway = started.gateway([], nodes, local_policy="local", access_log="true", outputs=tmp_path / "gateway")
        for number in range(50):
            assert complete(gateway.http, f"request-{number}", 5) == 200
        with urllib.request.urlopen(f"{gateway.http}/metrics?name[]=baton_log_lines_dropped_total") as answer:
            assert answer.read().splitlines()[-1].endswith(b" 0.0")
        os.set_blocking(pipes["gateway"], True)
        served: list[str] = []
        with open(pipes.pop("gateway")) as lines:
            while len(served) < 50:
                served += re.findall(r" request_id=(request-\d+) ", lines.readline())
            assert served == [f"request-{number}" for number in range(50)]
            assert started.end(gateway) == 0
        assert started.end(nodes[0]) == 0  # with a pipe that is still full
    os.close(pipes.pop("node"))
