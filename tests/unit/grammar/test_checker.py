"""Grammars are checked in a process that one of them may kill: what is refused, who waits, and what is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from baton.bounded import process as bounded_process
from baton.core.errors import InternalError, InvalidRequest, Overloaded
from baton.core.types import Grammar, GrammarKind
from baton.grammar.checker import CheckBounds, GrammarChecker
from baton.grammar.compiler import GrammarCompiler
from baton.node.waiting import until
from tests.unit.grammar.conftest import EOS, TOKENIZER, VOCAB_SIZE

BOUND_S = 120
YES = Grammar(GrammarKind.CHOICE, '["yes"]')


def heavy(number: int) -> Grammar:
    """One whose check takes some hundred times as long as that of an ordinary one."""
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(f'"{each:x}-{number}"' for each in range(8000)))


@asynccontextmanager
async def opened(bounds: CheckBounds | None = None, tokenizer: Path = TOKENIZER) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer, VOCAB_SIZE, (EOS,), bounds or CheckBounds(moment_cpu_s=BOUND_S, cpu_s=BOUND_S))
    try:
        async with asyncio.timeout(BOUND_S):
            yield checker
    finally:
        checker.close()


def forks(checker: GrammarChecker) -> list[psutil.Process]:
    """Of each lane; the one for grammars that take long is nicer."""
    return sorted(psutil.Process(checker.pid).children(), key=lambda fork: fork.nice())


async def until_gone(*processes: psutil.Process) -> None:
    def gone(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    assert await until(lambda: all(map(gone, processes)), timeout_s=BOUND_S)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, "(a"),
        Grammar(GrammarKind.LARK, "start: x\nx: b"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "no such format"}'),
        Grammar(GrammarKind.CHOICE, '["\ud800"]'),
    ],
)
async def test_a_grammar_is_refused_in_the_compilers_words(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as here:
        compiler.compile(grammar)
    async with opened() as checker:
        for _ in range(2):  # found, and known
            with pytest.raises(InvalidRequest) as refused:
                await checker.check(grammar)
            assert vars(refused.value) == vars(here.value)


async def test_what_cannot_be_a_grammar_costs_no_process(tmp_path: Path) -> None:
    async with opened() as checker, opened(tokenizer=tmp_path / "tokenizer.json") as without:
        with pytest.raises(InvalidRequest, match="bytes"):
            await checker.check(Grammar(GrammarKind.REGEX, "a" * 300_000))
        with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
            await without.check(YES)
        assert (checker.pid, without.pid) == (None, None)


async def test_a_grammar_that_takes_too_much_time_is_refused_and_the_next_one_is_checked() -> None:
    async with opened(CheckBounds(moment_cpu_s=0.002, cpu_s=0.002)) as checker:
        for _ in range(2):
            with pytest.raises(
                InvalidRequest, match=r"more than 0\.002 s of CPU time to check; simplify it"
            ) as refused:
                await checker.check(heavy(1))
            assert refused.value.field == "grammar"
    async with opened(CheckBounds(moment_cpu_s=0.002)) as checker:  # it gets more time when no ordinary one waits
        await checker.check(heavy(1))


async def test_a_schema_that_the_library_never_finishes_is_refused() -> None:
    """Twenty expressions whose states multiply: compiled without a bound it runs for minutes."""
    patterns = [{"pattern": f".*a.{{{20 + number}}}.*"} for number in range(20)]
    schema = json.dumps({"type": "string", "allOf": patterns})
    async with opened(CheckBounds(moment_cpu_s=0.02, cpu_s=0.3)) as checker:
        with pytest.raises(InvalidRequest, match="takes more than"):
            await checker.check(Grammar(GrammarKind.JSON_SCHEMA, schema))


async def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    async with opened(CheckBounds(moment_cpu_s=BOUND_S, memory_bytes=1 << 20)) as checker:
        with pytest.raises(InvalidRequest, match="more than 1 MiB of memory"):
            await checker.check(heavy(1))


async def test_grammars_that_take_long_delay_no_others() -> None:
    """A check that is stopped takes as long as one can."""
    async with opened(CheckBounds(moment_cpu_s=0.02, cpu_s=BOUND_S)) as checker:
        await checker.check(YES)
        _, long = forks(checker)
        long.suspend()
        crowd = [asyncio.create_task(checker.check(heavy(number))) for number in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest):
            await checker.check(Grammar(GrammarKind.REGEX, "(a"))
        assert not any(each.done() for each in crowd)
        crowd[0].cancel()  # whether or not it is the one that is checked, the others get their turn
        long.resume()
        assert await asyncio.gather(*crowd[1:4]) == [None] * 3
        for each in crowd:
            each.cancel()
        await asyncio.wait(crowd)


async def test_a_client_with_many_grammars_delays_others_by_one_of_them() -> None:
    async with opened() as checker:
        await checker.check(YES)
        fork = forks(checker)[0]
        fork.suspend()
        ended: list[str] = []

        async def ask(client: str, number: int) -> None:
            await checker.check(Grammar(GrammarKind.CHOICE, f'["{number}"]'), client=client)
            ended.append(client)

        async with asyncio.TaskGroup() as asking:
            for number in range(30):
                asking.create_task(ask("crowd", number))
            await asyncio.sleep(0)
            for number in (98, 99):
                asking.create_task(ask("other", number))
            await asyncio.sleep(0)
            fork.resume()
        assert ended[:4] == ["crowd", "other", "crowd", "other"]


async def test_a_client_that_leaves_gives_no_answer_to_the_next_one() -> None:
    async with opened() as checker:
        await checker.check(YES)
        fork = forks(checker)[0]
        fork.suspend()
        leaves = asyncio.create_task(checker.check(Grammar(GrammarKind.REGEX, "(a")))
        await asyncio.sleep(0)
        leaves.cancel()
        stays = asyncio.create_task(checker.check(Grammar(GrammarKind.REGEX, "a")))
        await asyncio.sleep(0)
        fork.resume()
        await stays
        assert leaves.cancelled()


async def test_equal_grammars_are_checked_once() -> None:
    async with opened() as checker:
        await asyncio.gather(*(checker.check(heavy(1)) for _ in range(20)))
        assert len(checker._verdicts) == 1
        psutil.Process(checker.pid).kill()
        await checker.check(heavy(1))  # known without a process


@pytest.mark.parametrize("of_fork", [True, False])
async def test_a_check_goes_on_after_its_process_was_killed(of_fork: bool) -> None:
    async with opened() as checker:
        await checker.check(YES)
        fork = forks(checker)[0]
        fork.suspend()
        checking = asyncio.create_task(checker.check(Grammar(GrammarKind.REGEX, "a")))
        await asyncio.sleep(0)
        (fork if of_fork else psutil.Process(checker.pid)).kill()
        await checking
        await until_gone(fork)


async def test_a_process_that_does_not_start_is_logged_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as checker:
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/bin/false")
            broken.setattr(bounded_process, "_RESTART_S", BOUND_S)  # longer than any machine takes for three checks
            for _ in range(3):
                with pytest.raises(Overloaded, match="cannot be checked now") as refused:
                    await checker.check(YES)
                assert refused.value.retry_after_s
        assert "ended before its first answer" in caplog.text
        assert len(caplog.records) < 3  # there is a pause between two starts
        monkeypatch.setattr(bounded_process, "_RESTART_S", 0.0)
        checker._process._next_start_s = 0.0
        await checker.check(YES)


async def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text(TOKENIZER.read_text().replace('"model"', '"other"', 1))
    async with opened(tokenizer=broken) as checker:
        with pytest.raises(InternalError):
            await checker.check(YES)


async def test_close_leaves_no_process() -> None:
    async with opened() as checker:
        await checker.check(YES)
        assert checker.pid is not None
        processes = [psutil.Process(checker.pid), *forks(checker)]
        checker.close()
        await until_gone(*processes)
        assert checker.pid is None
        with pytest.raises(Overloaded, match="the gateway ends"):
            await checker.check(Grammar(GrammarKind.REGEX, "a"))


async def test_a_kill_of_the_parent_ends_the_process_even_during_a_check() -> None:
    program = "import asyncio; from tests.unit.grammar.test_checker import be_killed; asyncio.run(be_killed())"
    run = partial(subprocess.run, [sys.executable, "-c", program], check=False, capture_output=True, text=True)
    done = await asyncio.to_thread(run)
    assert done.returncode == -signal.SIGKILL
    pids = [int(each) for each in done.stdout.split()]
    assert len(pids) == 3
    await until_gone(*(psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)))


async def be_killed() -> None:
    """Runs in a process of its own."""
    checker = GrammarChecker(TOKENIZER, VOCAB_SIZE, (EOS,))
    await checker.check(YES)
    assert checker.pid is not None
    fork = forks(checker)[0]
    fork.suspend()
    checking = asyncio.create_task(checker.check(heavy(1)))
    await asyncio.sleep(0)
    print(checker.pid, *(each.pid for each in forks(checker)), flush=True)
    assert not checking.done()
    os.kill(os.getpid(), signal.SIGKILL)
