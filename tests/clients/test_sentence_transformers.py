"""Vectors and scores of real processes equal those of the library sentence-transformers, from the same checkpoints."""

import json
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.install import CLIENTS
from tests.integration.cluster import DEADLINE_S, machines
from tests.pooling.checkpoints import save_classifier, save_embedding, save_reranker

SCRIPT = Path(__file__).with_name("sentences.py")
TEXTS = ["Where is the file?", "x", "The file is open for writing. " * 5, "Return the number of bytes."]
QUERY = "open a file"
PROMPTS = {"query": "Instruct: find it\nQuery:", "passage": "passage: "}
# As in the model card of Qwen3-Reranker: with it, sentence-transformers writes a pair into the model's prompt.
RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}'
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>{{ '\n\n' }}"  # jinja drops a template's last newline
)


@dataclass(frozen=True)
class Checkpoint:
    """How one is saved, and what is asked of it. With `generates`, its cluster needs a decode node."""

    save: Callable[[Path], Any]
    prompt_name: str | None = None
    query: str | None = None
    generates: bool = False


def save_templated_reranker(directory: Path) -> None:
    save_reranker(directory)
    (directory / "chat_template.jinja").write_text(RERANKER_TEMPLATE)


def embedding(**fields: Any) -> Callable[[Path], Any]:
    return lambda directory: save_embedding(directory, prompts=PROMPTS, **fields)


CHECKPOINTS = {
    "last-token": Checkpoint(embedding()),
    "last-token-with-a-prompt": Checkpoint(embedding(), prompt_name="query"),
    "mean": Checkpoint(embedding(model="MistralModel", pooling="mean", normalize=False, sliding_window=None)),
    "mean-without-the-default-prompt": Checkpoint(
        embedding(pooling="mean", include_prompt=False, default_prompt_name="passage")
    ),
    "cls": Checkpoint(embedding(pooling="cls")),
    "classifier": Checkpoint(save_classifier, query=QUERY),
    "reranker": Checkpoint(save_templated_reranker, query=QUERY, generates=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a checkpoint under each name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, checkpoint in CHECKPOINTS.items():
        checkpoint.save(folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """What the library computes, by name."""
    asked = [
        {"directory": str(folder / name), "texts": TEXTS, "prompt_name": each.prompt_name, "query": each.query}
        for name, each in CHECKPOINTS.items()
    ]
    python = CLIENTS / "sentence_transformers" / "bin" / "python"
    done = subprocess.run([python, SCRIPT], input=json.dumps(asked), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return dict(zip(CHECKPOINTS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_vectors_and_scores_are_those_of_the_library(name: str, folder: Path, expected: dict[str, Any]) -> None:
    checkpoint, model = CHECKPOINTS[name], folder / name
    flags = {"model": model, "num_blocks": 512, "max_batch_tokens": 64}
    with machines() as start:
        prefill, *decode = start.nodes(("prefill", flags), *[("decode", flags)] * checkpoint.generates)
        http = start.gateway([prefill], decode, model=model).http
        if checkpoint.query is None:
            body = {"input": TEXTS} | ({"prompt_name": checkpoint.prompt_name} if checkpoint.prompt_name else {})
            found = [each["embedding"] for each in post(f"{http}/v1/embeddings", body)["data"]]
        else:
            body = {"text_1": checkpoint.query, "text_2": TEXTS}
            found = [each["score"] for each in post(f"{http}/v1/score", body)["data"]]
    assert found == [pytest.approx(each, abs=1e-5) for each in expected[name]]


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)
