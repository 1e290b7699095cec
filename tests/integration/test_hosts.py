"""A node whose ranks are on two hosts: it serves as any other, ends in order, and a lost host ends no other node.

The hosts are two loopback addresses and, on machines that let us make them, two network namespaces.
"""

import asyncio
import socket
import subprocess
from pathlib import Path

import pytest

from baton.security.certificates import write_set
from tests.integration import two_hosts
from tests.integration.cluster import DEADLINE_S, Machines, arguments
from tests.integration.reference import Reference
from tests.integration.two_hosts import LOOPBACK, flags_of_both, requests_go_on_after_a_lost_host, second_host
from tests.warm import launch_warm

IN_NAMESPACES = two_hosts.command()
WAYS = {"killed": None} | ({"cut off": IN_NAMESPACES} if IN_NAMESPACES else {})


@pytest.mark.slow
@pytest.mark.parametrize("command", WAYS.values(), ids=WAYS)
def test_a_lost_host_ends_its_node_and_its_requests_continue_elsewhere(
    start: Machines, reference: Reference, tmp_path: Path, command: list[str] | None
) -> None:
    if command is None:
        asyncio.run(requests_go_on_after_a_lost_host(start, reference, LOOPBACK, tmp_path))
    else:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr


def test_hosts_end_with_the_first_one(start: Machines, tmp_path: Path) -> None:
    write_set(tmp_path, hosts=["127.0.0.1"], days=1)
    both = flags_of_both(tmp_path, LOOPBACK)
    with second_host(LOOPBACK, both) as second:
        (first,) = start.nodes(("decode", both))
        assert start.end(first) == 0
        assert second.wait(DEADLINE_S) == 0


def test_a_host_with_other_settings_is_refused_in_one_line(start: Machines, tmp_path: Path) -> None:
    write_set(tmp_path, hosts=["127.0.0.1"], days=1)
    both = flags_of_both(tmp_path, LOOPBACK)
    first = start.processes.start("decode_node", arguments({**both, "device": "cpu"}))
    with second_host(LOOPBACK, {**both, "tensor_parallel_size": 4}, tmp_path) as second:
        assert second.wait(DEADLINE_S) == 2
    lines = (tmp_path / "stderr").read_text().splitlines()
    (refused,) = [line for line in lines if "cannot join host 0" in line]
    assert "ranks=2" in refused
    assert "ranks=4" in refused
    assert start.end(first) == 0, "it still waits, and ends when it is asked to"


def test_a_leader_whose_address_is_taken_says_so_in_one_line(tmp_path: Path) -> None:
    write_set(tmp_path, hosts=["127.0.0.1"], days=1)
    both = flags_of_both(tmp_path, LOOPBACK)
    host, _, port = str(both["leader_address"]).partition(":")
    with socket.create_server((host, int(port))):
        first = launch_warm("decode_node", arguments({**both, "device": "cpu"}), outputs=tmp_path)
        assert first.wait(DEADLINE_S) == 2
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert [line for line in lines if "the port may be in use" in line] == lines[-1:]
