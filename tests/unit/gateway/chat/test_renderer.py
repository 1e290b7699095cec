"""Conversations are rendered in a process that can be killed: what is refused, who waits, and what is left."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.core.errors import BatonError, ConfigError, InvalidRequest, Overloaded
from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat.checkpoint import Checkpoint
from baton.gateway.text.chat.checkpoint_files import read_checkpoint
from baton.gateway.text.chat.model import ChatModel
from baton.gateway.text.chat.renderer import ChatRenderer, RenderBounds
from baton.gateway.text.chat.types import ChatRequest, NamedTool, PreparedChat
from baton.node.waiting import until
from baton.settings.config import DEMO_MODELS
from tests.unit.gateway.chat.checkpoints import write_checkpoint

BOUND_S = 120
USER = ({"role": "user", "content": "hi"},)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHOW = "{% for m in messages %}{{ m.content }}{% endfor %}"
POWER = SHOW + "{{ 9 ** n if n }}"  # harmless, but for one request
LONG = ChatRequest(USER, template_kwargs={"n": 99_999_999})
SHORT = RenderBounds(moment_cpu_s=0.1, cpu_s=0.3)


def checkpoint(template: str) -> Checkpoint:
    return Checkpoint({"default": template}, variables={}, tokens={}, special=frozenset(), model_type="")


@asynccontextmanager
async def opened(template: str | Checkpoint, bounds: RenderBounds | None = None) -> AsyncIterator[ChatRenderer]:
    made = checkpoint(template) if isinstance(template, str) else template
    renderer = ChatRenderer(made, bounds or RenderBounds(moment_cpu_s=BOUND_S, cpu_s=BOUND_S))
    try:
        async with asyncio.timeout(BOUND_S):
            yield renderer
    finally:
        renderer.close()


def forks(renderer: ChatRenderer) -> list[psutil.Process]:
    """Of each lane; the one for renderings that take long is nicer."""
    return sorted(psutil.Process(renderer.pid).children(), key=lambda fork: fork.nice())


async def until_gone(*processes: psutil.Process) -> None:
    def gone(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    assert await until(lambda: all(map(gone, processes)), timeout_s=BOUND_S)


REQUESTS: Mapping[str, ChatRequest] = {
    "a message": ChatRequest(USER),
    "a forced call": ChatRequest(USER, (TOOL,), tool_choice=NamedTool("f"), parallel_tool_calls=False),
    "a grammar": ChatRequest(USER, grammar=Grammar(GrammarKind.CHOICE, '["\N{SNOWMAN}"]')),
    "numbers of any size": ChatRequest(({"role": "user", "content": "a", "x": [10**40, float("inf"), None]},)),
    "half a character": ChatRequest(({"role": "user", "content": "\ud800"},)),
    "no such template": ChatRequest(USER, template="mine"),
    "no messages": ChatRequest(()),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_is_prepared_as_by_the_model_itself(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, SHOW + "{{ messages | tojson }}{# <tool_call> #}")
    read = read_checkpoint(tmp_path, None)

    async def outcome(prepare: Any) -> object:
        try:
            return await prepare(REQUESTS[name])
        except BatonError as error:
            return type(error), vars(error)

    async def prepare_here(request: ChatRequest) -> PreparedChat:
        return ChatModel(read).prepare(request)

    async with opened(read) as renderer:
        assert await outcome(renderer.prepare) == await outcome(prepare_here)


TOO_LONG = "more than 0.3 s of CPU time"
LOOPS = "{% for a in 'x' * 9999 %}"


@pytest.mark.parametrize(
    ("template", "bounds", "took"),
    [
        ("{{ 9 ** 99999999 }}", SHORT, TOO_LONG),  # while it is compiled
        (3 * LOOPS + 3 * "{% endfor %}", SHORT, TOO_LONG),
        ("{{ 'a' * 10 ** 10 }}", RenderBounds(), "more than 128 MiB of memory"),
    ],
)
async def test_a_template_that_takes_too_much_is_refused_at_the_start(
    template: str, bounds: RenderBounds, took: str
) -> None:
    async with opened(template, bounds) as renderer:
        with pytest.raises(ConfigError, match=f"{re.escape(took)}.*--chat-template FILE") as refused:
            await renderer.check()
    assert refused.value.field == "chat_template"


async def test_a_conversation_that_is_nested_too_deeply_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        nested = [nested]
    async with opened(SHOW) as renderer:
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            await renderer.prepare(ChatRequest(({"role": "user", "content": "hi", "x": nested},)))
        assert (await renderer.prepare(ChatRequest(USER))).prompt == "hi"


async def test_a_template_that_is_none_is_refused_at_the_start() -> None:
    async with opened("{% if %}") as renderer:
        with pytest.raises(ConfigError, match="chat_template is not a chat template"):
            await renderer.check()


async def test_a_checkpoint_without_a_template_costs_no_process() -> None:
    without = Checkpoint({}, variables={}, tokens={}, special=frozenset(), model_type="")
    async with opened(without) as renderer:
        await renderer.check()
        assert renderer.pid is None


async def test_a_conversation_that_takes_too_much_time_is_refused_and_the_next_one_is_rendered() -> None:
    async with opened(POWER, SHORT) as renderer:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"more than 0\.3 s of CPU time for the conversation") as refused:
                await renderer.prepare(LONG)
            assert refused.value.field == "messages"
            assert (await renderer.prepare(ChatRequest(USER))).prompt == "hi"


async def test_a_conversation_that_takes_too_much_memory_is_refused_and_the_next_one_is_rendered() -> None:
    async with opened(SHOW + "{{ ('a' * n) | list if n }}") as renderer:
        with pytest.raises(InvalidRequest, match="more than 128 MiB of memory"):
            await renderer.prepare(ChatRequest(USER, template_kwargs={"n": 10**9}))
        assert (await renderer.prepare(ChatRequest(USER))).prompt == "hi"


async def test_a_large_conversation_has_the_memory_that_it_needs() -> None:
    text = "\N{SNOWMAN}a" * (4 << 20)
    request = ChatRequest(({"role": "user", "content": text},))
    async with opened(SHOW + "{{ messages | tojson }}", RenderBounds(cpu_s=BOUND_S)) as renderer:
        assert (await renderer.prepare(request, size_bytes=len(text))).prompt.startswith(text)


async def test_a_crowd_whose_clients_have_left_delays_no_other() -> None:
    async with opened(POWER, SHORT) as renderer:
        await renderer.check()
        crowd = [asyncio.create_task(renderer.prepare(LONG, client="crowd")) for _ in range(24)]
        await asyncio.sleep(0)
        for each in crowd:
            each.cancel()
        await asyncio.wait(crowd)
        assert (await renderer.prepare(ChatRequest(USER), client="other")).prompt == "hi"
        # At most the one that had begun took its bound.
        assert psutil.Process(renderer.pid).cpu_times().children_user < 2 * (SHORT.moment_cpu_s + SHORT.cpu_s)


async def test_renderings_that_take_long_delay_no_others() -> None:
    """A rendering that is stopped takes as long as one can."""
    async with opened(POWER, SHORT) as renderer:
        await renderer.check()
        _, long = forks(renderer)
        long.suspend()
        crowd = [asyncio.create_task(renderer.prepare(LONG, client=str(number))) for number in range(3)]
        large = asyncio.create_task(renderer.prepare(ChatRequest(USER), size_bytes=1 << 24))
        for _ in range(5):
            assert (await renderer.prepare(ChatRequest(USER), client="other")).prompt == "hi"
        assert not any(each.done() for each in (*crowd, large))
        long.resume()
        assert (await large).prompt == "hi"
        assert {type(each) for each in await asyncio.gather(*crowd, return_exceptions=True)} == {InvalidRequest}


@pytest.mark.parametrize("of_fork", [True, False])
async def test_a_rendering_goes_on_after_its_process_was_killed(of_fork: bool) -> None:
    async with opened(SHOW) as renderer:
        await renderer.check()
        fork = forks(renderer)[0]
        fork.suspend()
        rendering = asyncio.create_task(renderer.prepare(ChatRequest(USER)))
        await asyncio.sleep(0)
        (fork if of_fork else psutil.Process(renderer.pid)).kill()
        assert (await rendering).prompt == "hi"
        await until_gone(fork)


async def test_close_ends_even_an_endless_rendering() -> None:
    async with opened(POWER) as renderer:
        await renderer.check()
        processes = [psutil.Process(renderer.pid), *forks(renderer)]
        rendering = asyncio.create_task(renderer.prepare(LONG))
        assert await until(lambda: processes[1].cpu_times().user > 0.1, timeout_s=BOUND_S)
        renderer.close()
        with pytest.raises(Overloaded, match="the gateway ends"):
            await rendering
        await until_gone(*processes)


async def test_the_process_has_no_socket_and_no_key_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "secret-of-the-gateway")
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
        async with opened(SHOW) as renderer:
            await renderer.check()
            processes = [psutil.Process(renderer.pid), *forks(renderer)]
            assert len(processes) == 3
            for process in processes:
                assert process.net_connections() == []
                assert "secret-of-the-gateway" not in str(process.environ())


async def test_a_kill_of_the_gateway_ends_even_an_endless_rendering() -> None:
    program = "import asyncio; from tests.unit.gateway.chat.test_renderer import be_killed; asyncio.run(be_killed())"
    run = partial(subprocess.run, [sys.executable, "-c", program], check=False, capture_output=True, text=True)
    done = await asyncio.to_thread(run)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(each) for each in done.stdout.split()]
    assert len(pids) == 3
    await until_gone(*(psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)))


async def be_killed() -> None:
    """Runs in a process of its own."""
    renderer = ChatRenderer(checkpoint(POWER), RenderBounds(moment_cpu_s=BOUND_S))
    await renderer.check()
    fork = forks(renderer)[0]
    rendering = asyncio.create_task(renderer.prepare(LONG))
    assert await until(lambda: fork.cpu_times().user > 0.1, timeout_s=BOUND_S)
    print(renderer.pid, *(each.pid for each in forks(renderer)), flush=True)
    assert not rendering.done()
    os.kill(os.getpid(), signal.SIGKILL)


async def test_the_demo_model_s_template_is_one() -> None:
    async with opened(read_checkpoint(DEMO_MODELS / "llama", None), RenderBounds()) as renderer:
        await renderer.check()
