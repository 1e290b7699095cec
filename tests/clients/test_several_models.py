"""The examples of docs/several-models.md: one address in front of two clusters, each with its own model."""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.settings.config import DEMO_MODELS
from tests.clients.install import CLIENTS, ROOT
from tests.clients.page import free_port
from tests.clients.test_envoy import ENVOY, until
from tests.integration.cluster import DEADLINE_S
from tests.integration.up import Up, interrupt, start_up

EXAMPLES = ROOT / "examples" / "several-models"
MODELS = ("llama", "deepseek")
TURN = {"role": "user", "content": "What does zip do?"}
# Asks LiteLLM's router, which reads the same list as its proxy.
ROUTER = """
import json, sys, yaml, litellm
router = litellm.Router(**yaml.safe_load(open(sys.argv[1])))
for model in sys.argv[2:]:
    answer = router.completion(model=model, messages=[{"role": "user", "content": "zip"}], max_tokens=4)
    print(answer.model)
"""


@pytest.fixture(scope="module")
def ports(cluster: Up) -> Iterator[dict[str, str]]:
    """The port of each model's cluster, by its port in the examples."""
    second = start_up("--model", str(DEMO_MODELS / "deepseek"))
    addresses = [str(each.line["http"]) for each in (cluster, second)]
    yield dict(zip(("8001", "8002"), (address.rpartition(":")[2] for address in addresses), strict=True))
    assert interrupt(second) == 0


def example(name: str, folder: Path, ports: dict[str, str]) -> Path:
    """Writes an example with the ports of this test."""
    text = (EXAMPLES / name).read_text()
    for given, port in ports.items():
        assert text.count(given) == 1
        text = text.replace(given, port)
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def envoy(ports: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("envoy")
    port = str(free_port())
    config = example("envoy.yaml", folder, {**ports, "8000": port})
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        command = [str(ENVOY), "--config-path", str(config), "--concurrency", "1", "--use-dynamic-base-id"]
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: answers(url), running)
        yield url
    finally:
        running.kill()
        running.wait()


def answers(url: str) -> bool:
    try:
        return bool(get(f"{url}/health"))
    except OSError:
        return False


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return json.load(answer)


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_envoy_sends_a_request_to_its_models_cluster(envoy: str, path: str, model: str) -> None:
    status, answer = post(f"{envoy}{path}", {"model": model, "max_tokens": 4, "messages": [TURN]})
    assert (status, answer["model"]) == (200, model)


def test_envoy_answers_for_no_model_and_for_an_unknown_one(envoy: str) -> None:
    assert post(f"{envoy}/v1/completions", {"prompt": "zip", "max_tokens": 4})[1]["model"] == "llama"
    status, answer = post(f"{envoy}/v1/completions", {"model": "gpt", "prompt": "zip", "max_tokens": 4})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_envoy_finds_each_models_card(envoy: str) -> None:
    assert [get(f"{envoy}/v1/models/{model}")["id"] for model in MODELS] == list(MODELS)


def test_envoy_passes_a_long_body_whose_model_comes_last(envoy: str) -> None:
    body = {"prompt": " " * 3_000_000 + "zip", "add_special_tokens": False, "model": "deepseek"}
    status, answer = post(f"{envoy}/tokenize", body)
    # The cluster that knows the model answers: the text is too long for the other too, but there the model is unknown.
    assert (status, answer.get("error", {}).get("code")) != (404, "model_not_found")


def test_litellm_finds_each_models_cluster(ports: dict[str, str], environment: dict[str, str], tmp_path: Path) -> None:
    config = example("litellm.yaml", tmp_path, ports)
    python = CLIENTS / "python" / "bin" / "python"
    done = subprocess.run(
        [python, "-c", ROUTER, str(config), *MODELS],
        env={**environment, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(MODELS)
