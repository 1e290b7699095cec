"""Embeddings, rerank and scores from real processes, without a decode node, equal transformers' hidden states."""

import asyncio
import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from baton.cli.processes import Process
from tests.integration.cluster import DEADLINE_S, Machines, machines, until_status
from tests.pooling.checkpoints import save_classifier, save_embedding, save_reranker
from tests.pooling.reference import classifier_score, embed, instruct_score

TOLERANCE = 1e-4
NODE = {"num_blocks": 512, "max_batch_tokens": 64}
TEXTS = ["Where is the file?", "x", "The file is open for writing. " * 5, "Return the number of bytes."]


def post(gateway: Process, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[Any, Any]:
    """The answer's JSON and headers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{gateway.http}{path}", data, {"content-type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer), answer.headers


def refused(gateway: Process, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(gateway, path, body)
    with caught.value as error:
        return error.code, json.load(error)["error"]


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("checkpoints") / "qwen3-embedding"
    return directory, save_embedding(directory, prompts={"query": "Instruct: find it\nQuery:", "document": ""})


@pytest.fixture(scope="module")
def cluster(embedding: tuple[Path, Any]) -> Iterator[tuple[Process, list[Process], Machines]]:
    """A gateway with two prefill nodes and no decode node."""
    with machines() as start:
        nodes = start.nodes(*[("prefill", {"model": embedding[0], **NODE})] * 2)
        yield start.gateway(nodes, [], model=embedding[0]), nodes, start


@pytest.fixture
def gateway(cluster: tuple[Process, list[Process], Machines]) -> Process:
    return cluster[0]


@pytest.fixture(scope="module")
def client(cluster: tuple[Process, list[Process], Machines]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster[0].http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as opened:
        yield opened


def test_a_cluster_of_prefill_nodes_is_ready_and_openais_client_gets_the_references_vectors(
    client: OpenAI, gateway: Process, embedding: tuple[Path, Any]
) -> None:
    directory, model = embedding
    with urllib.request.urlopen(f"{gateway.http}/ready") as answer:
        assert answer.status == 200
    found = client.embeddings.create(model="qwen3-embedding", input=TEXTS)  # the library asks for base64
    assert [each.index for each in found.data] == [0, 1, 2, 3]
    for text, each in zip(TEXTS, found.data, strict=True):
        assert each.embedding == pytest.approx(embed(model, directory, text), abs=TOLERANCE)
        assert np.linalg.norm(each.embedding) == pytest.approx(1.0, abs=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 40


def test_every_form_of_input_and_output(gateway: Process, embedding: tuple[Path, Any]) -> None:
    directory, model = embedding
    ids = [5, 6, 7, 8]
    plain = embed(model, directory, TEXTS[0])
    for given, expected in (
        (TEXTS[0], [plain]),
        ([TEXTS[0]], [plain]),
        (ids, [embed(model, directory, ids)]),
        ([ids, ids[:2]], [embed(model, directory, ids), embed(model, directory, ids[:2])]),
    ):
        answer, _ = post(gateway, "/v1/embeddings", {"input": given, "user": "u"})
        assert [each["embedding"] for each in answer["data"]] == [
            pytest.approx(each, abs=TOLERANCE) for each in expected
        ]
    coded, _ = post(gateway, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})
    vector = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    assert vector == pytest.approx(plain, abs=TOLERANCE)
    short, headers = post(gateway, "/v1/embeddings", {"input": TEXTS[0], "dimensions": 8})
    assert short["data"][0]["embedding"] == pytest.approx(
        embed(model, directory, TEXTS[0], dimensions=8), abs=TOLERANCE
    )
    assert "may be cut" in headers["x-baton-warning"]
    query, _ = post(gateway, "/v1/embeddings", {"input": TEXTS[0], "prompt_name": "query"})
    prompt = "Instruct: find it\nQuery:"
    assert query["data"][0]["embedding"] == pytest.approx(
        embed(model, directory, TEXTS[0], prompt=prompt), abs=TOLERANCE
    )


def test_a_large_request_is_spread_over_both_nodes_and_its_receipts_say_so(
    gateway: Process, embedding: tuple[Path, Any]
) -> None:
    directory, model = embedding
    texts = [f"Number {index} of many. " * (1 + index % 3) for index in range(150)]
    answer, _ = post(gateway, "/v1/embeddings", {"input": texts, "baton": {"receipt": True}})
    receipts = answer["baton"]["receipts"]
    assert len({receipt["prefill_node"] for receipt in receipts}) == 2
    assert sum(receipt["prompts"] for receipt in receipts) == 150
    assert sum(receipt["prompt_tokens"] for receipt in receipts) == answer["usage"]["prompt_tokens"]
    assert all(receipt["prefill_s"] > 0 and receipt["attempts"] == 1 for receipt in receipts)
    for index in (0, 77, 149):
        assert answer["data"][index]["embedding"] == pytest.approx(embed(model, directory, texts[index]), abs=TOLERANCE)
    with urllib.request.urlopen(f"{gateway.http}/metrics") as page:
        metrics = page.read().decode()
    assert 'gen_ai_operation_name="embeddings"' in metrics


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"input": ""}, "input", ""),
        ({"input": []}, "input", ""),
        ({"input": ["a", ""]}, "input", ""),
        ({"input": [[]]}, "input", ""),
        ({"input": ["a", 1]}, "input", ""),
        ({"input": {"a": 1}}, "input", ""),
        ({}, "input", ""),
        ({"input": ["a"] * 100_000}, "input", "2048"),
        ({"input": [["a"]]}, "input", ""),
        ({"input": [1 << 31]}, "input", ""),
        ({"input": [9999]}, "input", "token id 9999"),
        ({"input": [-1]}, "input", ""),
        ({"input": "a " * 600}, "input[0]", "tokens"),
        ({"input": "a" * 3_000_000}, "input[0]", "tokens"),
        ({"input": "a", "dimensions": 0}, "dimensions", ""),
        ({"input": "a", "dimensions": 49}, "dimensions", "48"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "prompt_name": "none"}, "prompt_name", "query"),
        ({"input": "a", "stream": True}, "stream", "not a parameter"),
    ],
    ids=str,
)
def test_a_wrong_body_is_refused_with_its_field(gateway: Process, body: dict[str, Any], field: str, said: str) -> None:
    status, error = refused(gateway, "/v1/embeddings", body)
    assert status == 400
    assert error["param"].startswith(field)
    assert said in error["message"]


def test_what_the_model_cannot_do_is_said_with_the_cure(gateway: Process, client: OpenAI) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ]
    for path, body in bodies:
        status, error = refused(gateway, path, body)
        assert (status, error["param"]) == (400, "model")
        assert "/v1/embeddings" in error["message"]
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


async def test_a_killed_prefill_node_costs_no_request(embedding: tuple[Path, Any], start: Machines) -> None:
    directory, model = embedding
    flags = {"model": directory, **NODE}
    (lost,) = start.nodes(("prefill", flags), paused_engine=["prefill"])
    (kept,) = start.nodes(("prefill", flags))
    gateway = start.gateway([lost, kept], [], model=directory, failover_wait_s=0.5)
    body = {"input": [f"text {index}" for index in range(60)], "baton": {"receipt": True}}
    asking = [asyncio.create_task(asyncio.to_thread(post, gateway, "/v1/embeddings", body)) for _ in range(4)]
    await until_status(lost, lambda status: status.requests_running + status.requests_waiting > 0)
    start.kill(lost)
    answers = [answer for answer, _ in await asyncio.gather(*asking)]
    receipts = [
        receipt for answer in answers for receipt in answer["baton"].get("receipts", [answer["baton"].get("receipt")])
    ]
    assert any(receipt["attempts"] > 1 and "was lost" in receipt["why"] for receipt in receipts)
    for answer in answers:
        assert answer["data"][7]["embedding"] == pytest.approx(embed(model, directory, "text 7"), abs=TOLERANCE)
    start.kill(kept)
    status, error = await asyncio.to_thread(refused, gateway, "/v1/embeddings", {"input": "a"})
    assert status == 503, error


def test_mean_and_cls_pooling_of_other_families_and_prompts(start: Machines, tmp_path: Path) -> None:
    prompts = {"query": "query: ", "passage": "passage: "}
    mistral = save_embedding(
        tmp_path / "e5",
        model="MistralModel",
        pooling="mean",
        normalize=False,
        include_prompt=False,
        prompts=prompts,
        default_prompt_name="query",
        max_seq_length=32,
        sliding_window=None,
    )
    (node,) = start.nodes(("prefill", {"model": tmp_path / "e5", **NODE}))
    gateway = start.gateway([node], [], model=tmp_path / "e5")
    for _ in range(2):  # the second time, the prefix cache has the texts
        answer, _ = post(gateway, "/v1/embeddings", {"input": TEXTS[:2]})
        for text, each in zip(TEXTS, answer["data"], strict=False):
            expected = embed(mistral, tmp_path / "e5", text, prompt="query: ")
            assert each["embedding"] == pytest.approx(expected, abs=TOLERANCE)
    status, error = refused(gateway, "/v1/embeddings", {"input": "word " * 40})
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_long_texts_are_cut_on_request_before_the_tokens_that_end_every_prompt(gateway: Process) -> None:
    def ids(text: str) -> list[int]:
        return list(post(gateway, "/tokenize", {"prompt": text})[0]["tokens"])

    text, ends = "one two three four five six seven eight nine ten " * 4, ids("")
    whole = ids(text)
    assert whole[-len(ends) :] == ends
    for most in (len(ends) + 1, 12):
        expected, _ = post(gateway, "/v1/embeddings", {"input": whole[: most - len(ends)] + ends})
        answer, _ = post(gateway, "/v1/embeddings", {"input": text, "truncate_prompt_tokens": most})
        assert answer["usage"]["prompt_tokens"] == most
        assert answer["data"][0]["embedding"] == pytest.approx(expected["data"][0]["embedding"], abs=TOLERANCE)
    short, _ = post(gateway, "/v1/embeddings", {"input": "one", "truncate_prompt_tokens": 12})
    assert short["usage"]["prompt_tokens"] == len(ids("one"))
    status, error = refused(gateway, "/v1/embeddings", {"input": text * 500})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input[0]")
    most = int(error["message"].partition("allowed: 1 to ")[2].split()[0])
    assert error["message"].startswith(f"This model's maximum context length is {most} tokens. However, input[0] has ")
    assert error["message"].endswith("shorten or split it, or cut it with truncate_prompt_tokens -1")
    longest, _ = post(gateway, "/v1/embeddings", {"input": text * 500, "truncate_prompt_tokens": -1})
    assert longest["usage"]["prompt_tokens"] == most
    for wrong in (0, -2, most + 1, len(ends)):
        status, error = refused(gateway, "/v1/embeddings", {"input": text, "truncate_prompt_tokens": wrong})
        assert (status, error["param"]) == (400, "truncate_prompt_tokens"), error


@pytest.mark.parametrize("from_config", [False, True])
def test_qwen3_reranker_scores_by_yes_and_no_and_still_generates(
    start: Machines, tmp_path: Path, *, from_config: bool
) -> None:
    model = save_reranker(tmp_path / "reranker", from_config=from_config)
    flags = {"model": tmp_path / "reranker", **NODE}
    prefill, decode = start.nodes(("prefill", flags), ("decode", flags))
    gateway = start.gateway([prefill], [decode], model=tmp_path / "reranker")
    expected = [instruct_score(model, tmp_path / "reranker", "open a file", text) for text in TEXTS]
    for path in ("/v1/rerank", "/rerank"):
        answer, _ = post(
            gateway, path, {"query": "open a file", "documents": [TEXTS[0], *[{"text": text} for text in TEXTS[1:]]]}
        )
        results = answer["results"]
        assert [each["relevance_score"] for each in results] == sorted(
            [each["relevance_score"] for each in results], reverse=True
        )
        for each in results:
            assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=TOLERANCE)
            assert each["document"] == {"text": TEXTS[each["index"]]}
    best, _ = post(
        gateway, "/v1/rerank", {"query": "open a file", "documents": TEXTS, "top_n": 1, "return_documents": False}
    )
    assert [set(each) for each in best["results"]] == [{"index", "relevance_score"}]
    scores, _ = post(gateway, "/v1/score", {"text_1": "open a file", "text_2": TEXTS})
    assert [each["score"] for each in scores["data"]] == pytest.approx(expected, abs=TOLERANCE)
    other, _ = post(
        gateway, "/v1/score", {"text_1": ["open a file"], "text_2": TEXTS[0], "instruction": "Does it name a file?"}
    )
    wanted = instruct_score(model, tmp_path / "reranker", "open a file", TEXTS[0], instruction="Does it name a file?")
    assert other["data"][0]["score"] == pytest.approx(wanted, abs=TOLERANCE)
    asked = {"query": "open a file", "documents": ["a"]}
    least = post(gateway, "/v1/rerank", asked)[0]["usage"]["prompt_tokens"]
    asked["documents"] = ["word " * 40]
    cut, _ = post(gateway, "/v1/rerank", {**asked, "truncate_prompt_tokens": least + 5})
    assert cut["usage"]["prompt_tokens"] == least + 5
    status, error = refused(gateway, "/v1/rerank", {**asked, "truncate_prompt_tokens": least - 2})
    assert (status, error["param"]) == (400, "truncate_prompt_tokens")
    written, _ = post(gateway, "/v1/completions", {"prompt": "a", "max_tokens": 2})
    assert written["usage"]["completion_tokens"] == 2
    status, error = refused(gateway, "/v1/embeddings", {"input": "a"})
    assert status == 400
    assert "/v1/rerank" in error["message"]
    for body, field in (
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["b"] * 3000}, "documents"),
        ({"query": "a", "documents": ["b ", "c " * 900]}, "documents[1]"),
        ({"query": "a", "documents": [{"body": "b"}]}, "documents"),
    ):
        status, error = refused(gateway, "/v1/rerank", body)
        assert status == 400
        assert error["param"].startswith(field)
    assert refused(gateway, "/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})[0] == 400


def test_a_classification_head_of_one_label_scores_pairs(start: Machines, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "classifier")
    (node,) = start.nodes(("prefill", {"model": tmp_path / "classifier", "tensor_parallel_size": 2, **NODE}))
    gateway = start.gateway([node], [], model=tmp_path / "classifier")
    scores, _ = post(gateway, "/v1/score", {"text_1": "open a file", "text_2": TEXTS})
    expected = [classifier_score(model, tmp_path / "classifier", "open a file", text) for text in TEXTS]
    assert [each["score"] for each in scores["data"]] == pytest.approx(expected, abs=TOLERANCE)


def test_a_generative_checkpoint_refuses_embeddings_with_the_cure(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", {}), ("decode", {}))
    gateway = start.gateway([prefill], [decode])
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        status, error = refused(gateway, path, body)
        assert (status, error["param"]) == (400, "model")
        assert "modules.json" in error["message"]
