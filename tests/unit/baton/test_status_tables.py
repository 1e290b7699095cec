"""`baton status` shows the gateway's processes and warnings, and the KV that nodes keep. No text of these controls the
terminal."""

import pytest
from rich.console import Console

from baton.cli.status_json import to_json
from baton.cli.status_tables import render
from baton.protos.v1 import node_status_pb2, operations_pb2

WARNING = "the chat template 'de\x1b[2Jfault' shows tools in an unknown format"


def test_warnings_are_shown_in_tables_and_in_json() -> None:
    cluster = operations_pb2.ClusterStatusResponse(gateway="gw", warnings=[WARNING])
    console = Console(width=160, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(render(cluster))
    assert "shows tools in an unknown format" in captured.get()
    assert "\x1b" not in captured.get()
    assert to_json(cluster)["warnings"] == [WARNING]


def test_kv_that_is_kept_outside_of_the_cache_is_shown_by_store() -> None:
    stores = [
        node_status_pb2.StoreState(name="host", entries=3, bytes=3 << 20, loaded_total=20),
        node_status_pb2.StoreState(name="file", bytes=9 << 20, damaged_total=2, failed_total=1),
        node_status_pb2.StoreState(name="peer", loaded_total=4),
    ]
    status = node_status_pb2.NodeStatus(stores=stores, kv_loaded_tokens_total=1280, kv_load_s_total=0.1)
    status.info.name, status.info.model.name = "prefill-0", "llama"
    node = operations_pb2.NodeReport(status=status, reachable=True)
    cluster = operations_pb2.ClusterStatusResponse(gateway="gw", nodes=[node])
    console = Console(width=160, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(render(cluster))
    shown_text = captured.get().replace("\n  ", " ")
    assert "host 3 MiB, 1,280 tokens read back; file 9 MiB, 0 tokens read back, 2 damaged, 1 calls failed" in shown_text
    assert "other nodes, 256 tokens read back" in " ".join(shown_text.split())
    assert "; loaded at 12,800 tokens/s" in " ".join(shown_text.split())
    shown = to_json(cluster)["nodes"]
    assert isinstance(shown, list)
    assert [store["name"] for store in shown[0]["stores"]] == ["host", "file", "peer"]


WORKERS = {
    (): "",
    ((0.034, 120, 0),): "1 worker 3 % busy, 120 tokens/s",
    ((0.1, 800, 8000), (0.52, 4700, 9000)): (
        "2 workers, the busiest 52 % busy, 5,500 tokens/s; one worker's limit: about 9,000"
    ),
}


@pytest.mark.parametrize(("loads", "line"), WORKERS.items())
def test_the_load_and_the_limit_of_the_busiest_worker_are_shown(
    loads: tuple[tuple[float, int, int], ...], line: str
) -> None:
    workers = [
        operations_pb2.WorkerLoad(busy_share=busy_share, tokens_per_s=rate, limit_tokens_per_s=limit)
        for busy_share, rate, limit in loads
    ]
    cluster = operations_pb2.ClusterStatusResponse(gateway="gw", workers=workers)
    console = Console(width=160, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(render(cluster))
    assert captured.get().splitlines()[2].strip() == line
    shown = [{"busy_share": each[0], "tokens_per_s": each[1], "limit_tokens_per_s": each[2] or None} for each in loads]
    assert to_json(cluster)["workers"] == shown


def test_the_share_of_draft_tokens_that_were_kept_is_shown() -> None:
    status = node_status_pb2.NodeStatus(drafted_tokens_total=1200, accepted_tokens_total=900)
    status.info.name, status.info.model.name = "decode-0", "llama"
    cluster = operations_pb2.ClusterStatusResponse(
        gateway="gw", nodes=[operations_pb2.NodeReport(status=status, reachable=True)]
    )
    console = Console(width=160, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(render(cluster))
    assert "75 % of 1,200 draft tokens accepted" in " ".join(captured.get().split())
    nodes = to_json(cluster)["nodes"]
    assert isinstance(nodes, list)
    assert (nodes[0]["drafted_tokens_total"], nodes[0]["accepted_tokens_total"]) == (1200, 900)


def test_nodes_with_the_same_topology_are_shown_in_one_line() -> None:
    nodes = []
    for name, host in (("prefill-0", "h1"), ("decode-0", "h1"), ("decode-1", "h\x1b[2J2"), ("decode-2", None)):
        labels = [] if host is None else ["zone=a", f"host={host}"]
        status = node_status_pb2.NodeStatus(info=node_status_pb2.NodeInfo(name=name, topology=labels))
        status.info.model.name = "llama"
        nodes.append(operations_pb2.NodeReport(status=status, reachable=True))
    cluster = operations_pb2.ClusterStatusResponse(gateway="gw", nodes=nodes)
    console = Console(width=160, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(render(cluster))
    assert "prefill-0, decode-0: at zone=a, host=h1\n" in captured.get()
    assert "decode-1: at zone=a, host=h" in captured.get()
    assert "decode-2: at" not in captured.get()
    assert "\x1b" not in captured.get()
    shown = to_json(cluster)["nodes"]
    assert isinstance(shown, list)
    assert [node["topology"] for node in shown[::3]] == [["zone=a", "host=h1"], []]
