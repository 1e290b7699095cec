"""The gateway smg drives Baton as it drives vLLM: over vLLM's engine protocol, with the tokenizer that Baton sends."""

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.core.sampling import SamplingParams
from tests.clients.install import CLIENTS
from tests.clients.page import free_port
from tests.integration.cluster import DEADLINE_S, LLAMA, machines

PROMPT = "The town had"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Process]:
    with machines() as start:
        nodes = start.nodes(("prefill", {"model": LLAMA}), ("decode", {"model": LLAMA}))
        yield start.gateway(nodes[:1], nodes[1:], model=LLAMA, local_policy="strict", kv_events=True)


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def smg_port(gateway: Process, metrics_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    log = tmp_path_factory.mktemp("smg") / "log"
    command: list[str | Path] = [
        CLIENTS / "smg" / "bin" / "smg",
        "launch",
        "--worker-urls",
        f"grpc://{gateway.address}",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--policy", "cache_aware"]
    with log.open("w") as output:
        smg = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield port
        assert smg.poll() is None, log.read_text()
    finally:
        smg.kill()  # its own shutdown waits for load balancers
        smg.wait(DEADLINE_S)


@pytest.fixture
async def smg(smg_port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of smg, once smg has registered the gateway and loaded its tokenizer."""
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{smg_port}/v1", api_key="none", max_retries=0) as client:
        async with asyncio.timeout(DEADLINE_S):
            while not await serves(client):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
        yield client


async def serves(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.completions.create(model="llama", prompt=PROMPT, max_tokens=1)
    except openai.APIError:
        return False
    return True


@pytest.fixture
async def expected(gateway: Process) -> str:
    """The greedy output at Baton's own door."""
    async with OperatorClient(gateway.address) as client:
        return (await client.complete(PROMPT, GREEDY)).text


async def test_a_completion_is_batons(smg: openai.AsyncOpenAI, expected: str) -> None:
    answer = await smg.completions.create(model="llama", prompt=PROMPT, max_tokens=12, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)


async def test_a_stream_is_batons(smg: openai.AsyncOpenAI, expected: str) -> None:
    stream = await smg.completions.create(
        model="llama",
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].text) > 3
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 12)


async def test_stop_strings_end_the_output(smg: openai.AsyncOpenAI, expected: str) -> None:
    stop = expected.split()[3]
    answer = await smg.completions.create(model="llama", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == expected[: expected.index(stop)]


async def test_seeds_repeat_an_output(smg: openai.AsyncOpenAI) -> None:
    texts = set()
    for _ in range(2):
        answer = await smg.completions.create(model="llama", prompt=PROMPT, max_tokens=12, temperature=0.8, seed=5)
        texts.add(answer.choices[0].text)
    assert len(texts) == 1


async def test_a_chat_is_answered_with_logprobs(smg: openai.AsyncOpenAI) -> None:
    answer = await smg.chat.completions.create(
        model="llama",
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)


async def test_one_prompt_gives_several_outputs(smg: openai.AsyncOpenAI) -> None:
    answer = await smg.completions.create(model="llama", prompt=PROMPT, max_tokens=6, temperature=1, n=3)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 18


async def test_an_answer_follows_its_schema(smg: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
        "required": ["city", "old"],
        "additionalProperties": False,
    }
    answer = await smg.chat.completions.create(
        model="llama",
        messages=[{"role": "user", "content": "Name a town."}],
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "town", "schema": schema}},
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert set(json.loads(content)) == {"city", "old"}


async def test_a_wrong_value_is_a_client_error(smg: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await smg.completions.create(model="llama", prompt=PROMPT, max_tokens=8, extra_body={"min_p": 7.0})
    assert caught.value.status_code == 400


async def test_a_client_that_leaves_ends_its_request(smg: openai.AsyncOpenAI, gateway: Process) -> None:
    stream = await smg.completions.create(
        model="llama", prompt=PROMPT, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    async with OperatorClient(gateway.address) as client, asyncio.timeout(DEADLINE_S):
        while (await client.loads()).requests_running:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)


def read_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        return str(response.read(), "utf-8")


async def test_its_index_has_the_blocks_that_batons_nodes_have(smg: openai.AsyncOpenAI, metrics_port: int) -> None:
    """smg chooses engines by this index; it counts what it could not place."""
    prompt = "The town had a river. " * 40
    answer = await smg.completions.create(model="llama", prompt=prompt, max_tokens=2, temperature=0)
    assert answer.usage is not None
    least = answer.usage.prompt_tokens // 64 - 1  # more, if blocks are smaller
    async with asyncio.timeout(DEADLINE_S):
        while True:
            lines = (await asyncio.to_thread(read_text, f"http://127.0.0.1:{metrics_port}/metrics")).splitlines()
            split = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
            figures = {name.partition("{")[0]: float(value) for name, _, value in split}
            if figures.get("smg_kv_index_blocks", 0) >= least > 0:
                break
            await asyncio.sleep(0.05)
    assert figures["smg_kv_event_parentless_blocks_total"] == 0
    assert figures["smg_kv_event_missed_batches_total"] == 0
