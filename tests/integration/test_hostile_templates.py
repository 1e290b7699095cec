"""A chat template that never ends costs the gateway neither its start, nor other requests, nor its end."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import AsyncOpenAI

from baton.node.waiting import until
from tests.integration.cluster import DEADLINE_S, LLAMA, machines
from tests.warm import run_warm

# Harmless, but for a request with the variable.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 9 ** n if n }}"
USER: Any = [{"role": "user", "content": "def main"}]
ENDLESS: dict[str, Any] = {"chat_template_kwargs": {"n": 99_999_999}}
CROWD = 12


@pytest.mark.parametrize("workers", [1, 2])
def test_a_template_that_takes_too_much_ends_the_start_with_one_line(tmp_path: Path, workers: int) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ 'a' * 10 ** 10 }}")
    flags = ("--chat-template", str(template), "--workers", str(workers), "--listen", "127.0.0.1:0")
    ended = run_warm("gateway", *flags, "--http-listen", "off", "--decode", "127.0.0.1:1", BATON_MODEL=str(LLAMA))
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "the chat template takes more than 128 MiB of memory" in ended.stderr
    assert "start the gateway with another template: --chat-template FILE" in ended.stderr


@pytest.mark.slow
async def test_conversations_that_never_end_delay_no_others_and_no_end_of_the_gateway(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    with machines() as started:
        prefill, decode = started.nodes(("prefill", {"model": LLAMA}), ("decode", {"model": LLAMA}))
        gateway = started.gateway([prefill], [decode], model=LLAMA, chat_template=template)
        async with AsyncOpenAI(
            base_url=f"{gateway.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        ) as client:

            async def chat(**more: Any) -> Any:
                return await client.chat.completions.create(model="llama", messages=USER, max_tokens=1, **more)

            await chat()
            crowd = [asyncio.create_task(chat(extra_body=ENDLESS)) for _ in range(CROWD)]
            process = psutil.Process(gateway.pid)
            await client.completions.create(model="llama", prompt="def main", max_tokens=1)
            for each in crowd[1:]:
                each.cancel()
            await chat()
            with pytest.raises(openai.BadRequestError, match="more than 3 s of CPU time for the conversation"):
                await crowd[0]
            await asyncio.wait(crowd)
            before = {child.pid: _cpu_s(child) for child in process.children(recursive=True)}

            def renders() -> bool:
                """Whether a fork has used a third of its CPU time since then."""
                return any(_cpu_s(child) > before.get(child.pid, 0.0) + 1 for child in process.children(recursive=True))

            again = asyncio.create_task(chat(extra_body=ENDLESS))
            assert await until(renders, timeout_s=DEADLINE_S)
            children = process.children(recursive=True)
            again.cancel()
        assert started.end(gateway) == 0
        # The kernel ends a fork after its parent, some time later on a busy machine.
        assert await until(lambda: not any(map(_runs, children)), timeout_s=DEADLINE_S)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user)
