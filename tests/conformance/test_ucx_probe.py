"""Made-up addresses of UCX workers: one that would crash the process that uses it crashes a trial process instead, and
the node continues to serve."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from types import NoneType

import psutil
import pytest
import torch

from baton.core.errors import DataLoss, Overloaded, PeerRefused
from baton.kvcache.layout import KVCacheLayout
from baton.settings.environment import child_environment
from kvtransfer.leases import LeaseGrant
from kvtransfer.transports import ucx_probe
from kvtransfer.transports.ucx import UcxTransport
from kvtransfer.transports.ucx_address import worker_address, wrap
from kvtransfer.transports.ucx_probe import UcxProbe, judge
from tests.conformance.kv import (
    DEADLINE_S,
    GQA,
    PEER,
    PREFILL_INCARNATION,
    SENDER,
    NodeEvents,
    connect,
    eventually,
    job,
    make_cache,
    make_transfer,
    plant,
    scattered_blocks,
    tokens_of,
)

MADE_UP = 40
TOKENS = 20
PARENT = """
import asyncio, sys
from kvtransfer.transports.ucx_probe import UcxProbe
async def main():
    probe = UcxProbe()
    await probe.check(bytes.fromhex(sys.argv[1]))
    print(probe.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes to try an address."""
    monkeypatch.setattr(ucx_probe, "_ANSWER_TIMEOUT_S", DEADLINE_S)


@pytest.fixture(scope="module")
def address() -> Iterator[bytes]:
    """Of a worker that is there."""
    with closing(UcxTransport()) as transport:
        yield transport.listen(1)


@pytest.fixture
async def probe() -> AsyncIterator[UcxProbe]:
    with closing(UcxProbe()) as probe:
        yield probe


def descriptors() -> set[tuple[str, str]]:
    """The open ones of this process, and what they are."""
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of this list itself
            found.add((each, os.readlink(f"/proc/self/fd/{each}")))
    return found


def cut_short(address: bytes) -> bytes:
    """The address without its last byte: UCX reads on in whatever follows."""
    return wrap(worker_address(address)[:-1], on_gpu=False)


def made_up(address: bytes, seed: int) -> bytes:
    """The address with some bytes changed, left out or cut off, and a right checksum."""
    chosen = random.Random(seed)
    worker = bytearray(worker_address(address))
    start, stop = sorted(chosen.sample(range(9, len(worker)), 2))
    match chosen.randrange(4):
        case 0:
            worker[start] ^= 1 << chosen.randrange(8)
        case 1:
            worker[start:stop] = chosen.randbytes(stop - start)
        case 2:
            del worker[start:stop]
        case 3:
            del worker[stop:]
    return wrap(bytes(worker), on_gpu=False)


async def test_the_address_of_a_worker_passes_and_one_cut_short_is_refused(probe: UcxProbe, address: bytes) -> None:
    await probe.check(address)
    process = probe.pid
    with pytest.raises(PeerRefused, match=r"crashes on the peer's address \(SIGSEGV\)"):
        await probe.check(cut_short(address))
    await probe.check(address)
    assert probe.pid == process


def test_an_address_whose_trial_came_to_its_limit_of_time_is_tried_again() -> None:
    """A machine that is busy, or was suspended, says nothing about the address."""
    judge(0, b"an address")
    with pytest.raises(Overloaded, match="took too long") as untried:
        judge(signal.SIGALRM, b"an address")
    assert untried.value.retry_after_s
    with pytest.raises(PeerRefused, match="SIGKILL"):
        judge(signal.SIGKILL, b"an address")


async def test_bytes_without_the_frame_are_refused_untried(probe: UcxProbe) -> None:
    with pytest.raises(PeerRefused, match="not one of a UCX worker"):
        await probe.check(b"somewhere")
    assert probe.pid is None


async def test_a_process_that_was_killed_is_replaced(probe: UcxProbe, address: bytes) -> None:
    await probe.check(address)
    assert probe.pid is not None
    killed = probe.pid
    os.kill(killed, signal.SIGKILL)
    await probe.check(address)
    assert probe.pid != killed


async def test_the_answer_to_a_cancelled_check_is_not_taken_for_that_to_the_next(
    probe: UcxProbe, address: bytes
) -> None:
    await probe.check(address)
    checks = [asyncio.create_task(probe.check(cut_short(address))) for _ in range(2)]
    await asyncio.sleep(0)
    checks[0].cancel()
    with pytest.raises(PeerRefused):
        await checks[1]
    await probe.check(address)


async def test_checks_that_wait_when_it_is_closed_end(probe: UcxProbe, address: bytes) -> None:
    await probe.check(address)
    checks = [asyncio.create_task(probe.check(address)) for _ in range(2)]
    await asyncio.sleep(0)
    probe.close()
    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(*checks, return_exceptions=True)
    assert [type(result) for result in results] == [Overloaded, Overloaded]
    assert probe.pid is None


async def test_the_process_inherits_no_descriptor_and_leaves_none(address: bytes) -> None:
    with tempfile.TemporaryFile() as ours:
        os.set_inheritable(ours.fileno(), True)
        before = descriptors()
        with closing(UcxProbe()) as probe:
            await probe.check(address)
            process = psutil.Process(probe.pid)
            inode = os.fstat(ours.fileno()).st_ino
            assert inode not in [os.stat(each.path).st_ino for each in process.open_files()]
            assert process.num_fds() <= 4
        # Others of this process may be closed meanwhile.
        await eventually(lambda: descriptors() <= before)
        assert not process.is_running()


def test_the_process_ends_with_a_node_that_is_killed(address: bytes) -> None:
    node = subprocess.Popen(
        [sys.executable, "-c", PARENT, address.hex()], stdout=subprocess.PIPE, env=child_environment(), text=True
    )
    assert node.stdout is not None
    with node.stdout:
        process = psutil.Process(int(node.stdout.readline()))
    node.kill()
    node.wait()
    process.wait(DEADLINE_S)


async def test_a_node_outlives_made_up_addresses_and_fills_leases_afterwards() -> None:
    """Each costs its own pair, and leaves no descriptor."""
    source, target, events = make_cache(GQA, KVCacheLayout.NHD, 8), make_cache(GQA, KVCacheLayout.NHD, 8), NodeEvents()
    async with (
        make_transfer(source, NodeEvents(), transport="ucx", incarnation=PREFILL_INCARNATION) as sender,
        make_transfer(target, events, transport="ucx", peers_are_known=False) as receiver,
    ):
        ends: list[BaseException | None] = []
        descriptors: list[int] = []
        address = await sender.listen(PEER + 1)
        for number in range(SENDER + 1, SENDER + 1 + MADE_UP):
            await receiver.listen(number)
            ends += await asyncio.gather(receiver.connect(number, made_up(address, number)), return_exceptions=True)
            await receiver.disconnect(number)
            descriptors.append(len(os.listdir("/proc/self/fd")))
        assert {PeerRefused} <= {type(end) for end in ends} <= {PeerRefused, DataLoss, NoneType}
        # A closed worker ends in later turns of the transfer, as does a connection to the other node; and the process
        # in which addresses are tried has some while it lives.
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= max(descriptors[: MADE_UP // 2]))
        await connect(sender, receiver)
        blocks = scattered_blocks(source, TOKENS, seed=1)
        plant(source, blocks, TOKENS)
        await receiver.open_lease(LeaseGrant(1, blocks, 0, TOKENS))
        await sender.send(job(1, blocks, 0, TOKENS))
        await eventually(lambda: bool(events.filled))
        assert torch.equal(tokens_of(source, blocks, TOKENS), tokens_of(target, blocks, TOKENS))
