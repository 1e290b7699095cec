"""schemathesis draws requests from the OpenAPI page, right and wrong ones: each gets an answer, none a server error."""

import collections
import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.install import CLIENTS, ROOT
from tests.integration.up import Up

# With fewer examples of each operation the phase that tries each bound of each field, thousands of them, is left out.
COVERAGE_FROM = 500
TIMEOUT_S = 1500


@pytest.mark.timeout(TIMEOUT_S)
def test_no_request_drawn_from_the_page_is_a_server_error(
    cluster: Up, environment: dict[str, str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    examples = int(pytestconfig.getoption("--schemathesis-examples", default="60"))
    record = tmp_path / "answers"
    run = [str(CLIENTS / "python" / "bin" / "schemathesis"), "run", f"{cluster.line['http']}/openapi.json"]
    phases = ["--phases", "coverage,fuzzing" if examples >= COVERAGE_FROM else "fuzzing"]
    checks = ["--checks", "not_a_server_error", "--continue-on-failure", "--request-timeout", "60"]
    chance = ["--max-examples", str(examples), "--seed", "1", "--generation-database", "none"]
    quiet = ["--suppress-health-check", "all", "--warnings", "off", "--no-color"]
    variables = {"SCHEMATHESIS_HOOKS": "tests.clients.schemathesis_hooks", "SCHEMATHESIS_RECORD": str(record)}
    done = subprocess.run(
        [*run, *phases, *checks, *chance, *quiet, "--workers", "2"],
        cwd=tmp_path,
        env={**environment, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    answers = [json.loads(line) for line in record.read_text().splitlines()]
    statuses = collections.Counter(answer["status"] for answer in answers)
    print(f"{len(answers)} requests, by status: {dict(statuses)}")
    assert [answer for answer in answers if answer["status"] >= 500] == []
    served = {answer["path"] for answer in answers if answer["method"] == "POST" and answer["status"] == 200}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"} <= served
