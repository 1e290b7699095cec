"""Frames of `baton top`, rendered from views: what they show, that they fit, and that no name in them controls the
terminal."""

import json
from typing import Any

import pytest
from rich.console import Console

from baton.cli.cluster_view import ClusterView, read_view
from baton.cli.frame import Frame, shares
from baton.core.errors import InternalError

NODE: dict[str, Any] = {
    "name": "decode-0", "address": "10.0.0.2:7001", "role": "decode", "state": "ready", "version": "1.0",
    "rows": 3, "running": 4, "seats": 64, "waiting": 1, "backlog_s": 0.25, "step_s": 0.0123, "blocks": 100,
    "blocks_free": 40,
}  # fmt: skip
PREFILL = NODE | {"name": "prefill-0", "address": "10.0.0.1:7001", "role": "prefill", "step_s": None}
LINK: dict[str, Any] = {
    "prefill": 0, "decode": 1, "peer": "decode-0", "state": "ready", "transport": "cuda_ipc", "gigabytes_per_s": 12.5,
    "latency_s": 7e-6, "bytes_total": 1_000_000,
}  # fmt: skip
REQUEST: dict[str, Any] = {
    "request_id": "r-1", "client": "alice", "outcome": "finished", "ended_at_s": 990.0, "ttft_s": 1.5,
    "total_s": 2.0, "prompt_tokens": 64, "completion_tokens": 8, "slow": ["first token after 1.50 s, above 500 ms"],
    "receipt": {"path": "remote", "why": "longer than the threshold"},
}  # fmt: skip
VIEW: dict[str, Any] = {
    "now_s": 1000.0, "gateway": "gw-1", "model": "llama", "version": "1.0",
    "totals": {"running": 3, "waiting": 2, "finished": 40, "failed": 1, "refused": 5, "remote": 30, "local": 10},
    "nodes": [PREFILL, NODE], "links": [LINK], "requests": [REQUEST],
    "charts": {
        "window_s": 10.0, "ttft_p50": [None, 0.1], "ttft_p99": [0.2, 0.4], "gap_p50": [None], "gap_p99": [None],
        "tokens_per_s": [0.0, 812.0],
    },
}  # fmt: skip
HOSTILE = "\x1b[2J\x1b]0;owned\x07 [red]bold[/red] \u202egnp.exe\r\n<b>x</b>"


def view(**changes: Any) -> ClusterView:
    return read_view(json.dumps(VIEW | changes))


def drawn(frame: Frame, *, width: int = 120, height: int = 40, terminal: bool = False) -> str:
    kind = "standard" if terminal else None
    console = Console(width=width, height=height, force_terminal=terminal, color_system=kind, highlight=False)  # type: ignore[arg-type]
    with console.capture() as captured:
        console.print(frame)
    return captured.get()


def lines(frame: Frame, width: int = 120, height: int = 40) -> list[str]:
    return drawn(frame, width=width, height=height).splitlines()


def rows(frame: Frame) -> list[str]:
    """The lines, with one space for several."""
    return [" ".join(line.split()) for line in lines(frame)]


def test_a_frame_shows_the_gateway_its_nodes_links_percentiles_and_slow_requests() -> None:
    shown = drawn(Frame(view()))
    for words in (
        "gw-1  llama  1.0  serving  00:16:40 UTC",
        "3 running  2 waiting  40 finished  1 failed  5 refused  30 remote  10 local  1 worker",
        "812 tokens/s, as the percentiles in the last 10 s",
    ):
        assert words in shown
    found = rows(Frame(view()))
    for line in (
        "TTFT p50 100 ms p99 400 ms ▅█",
        "gap p50 - p99 -",
        "prefill-0 prefill ready 60% 4/64 1 250 ms - 1.0 10.0.0.1:7001",
        "decode-0 decode ready 60% 3/64 1 250 ms 12.3 ms 1.0 10.0.0.2:7001",
        "prefill-0 decode-0 ready 12.50 7 1.0 MB cuda_ipc",
        "r-1 10 s 64+8 1.50 s 2.00 s remote first token after 1.50 s, above 500 ms",
    ):
        assert line in found


def test_a_node_shows_what_it_keeps_outside_of_its_cache() -> None:
    stores = [{"name": "host", "bytes": 1_340_000_000, "tokens_read": 9}, {"name": HOSTILE, "bytes": 0}]
    shown = drawn(Frame(view(nodes=[NODE | {"stores": stores}])), width=160)
    assert "host 1.34 GB, " in shown
    assert "\x1b" not in shown
    assert "kept" not in drawn(Frame(view()), width=160)


def test_a_link_shows_what_it_carries_since_the_view_before() -> None:
    later = view(now_s=1002.0, links=[LINK | {"bytes_total": 5_000_000}])
    restarted = view(now_s=1002.0, links=[LINK | {"bytes_total": 0}])
    assert "MB/s now" not in drawn(Frame(view()))
    assert "prefill-0 decode-0 ready 12.50 2.0 7 5.0 MB cuda_ipc" in rows(Frame(later, view()))
    assert "prefill-0 decode-0 ready 12.50 0.0 7 0.0 MB cuda_ipc" in rows(Frame(restarted, view()))


def test_what_is_mixed_has_a_line_and_revisions_a_column() -> None:
    assert "mixed" not in drawn(Frame(view()))
    line = "mixed versions: 1.0 on prefill-0, 1.1 on decode-0"
    nodes = [PREFILL | {"revision": "abcd"}, NODE | {"revision": "abce", "revision_name": "main@2"}]
    shown = drawn(Frame(view(mixed=line, nodes=nodes)))
    assert line in shown
    assert " abcd " in shown
    assert " main@2 " in shown


def test_a_node_or_link_that_cannot_be_used_says_why() -> None:
    lost = NODE | {"state": "unreachable", "detail": "connection refused"}
    refused = LINK | {"state": "refused", "detail": "dtype: bfloat16 and float16"}
    shown = drawn(Frame(view(nodes=[lost], links=[refused])), width=160)
    for words in ("no node is ready", "unreachable", "connection refused", "dtype: bfloat16 and float16"):
        assert words in shown


def test_a_gateway_that_is_gone_leaves_its_last_view_and_its_age() -> None:
    shown = lines(Frame(view(), trouble="cannot reach 127.0.0.1:7000: refused", age_s=12.0))
    assert shown[0] == "12 s old; no answer: cannot reach 127.0.0.1:7000: refused"
    assert shown[1].startswith("gw-1")
    assert lines(Frame(None, trouble="cannot reach it")) == ["no answer yet: cannot reach it"]


def test_an_empty_cluster_says_so() -> None:
    shown = drawn(Frame(read_view("{}")))
    for words in ("no node is ready", "no node is known", "no link is known", "none of the last 0 requests"):
        assert words in shown


@pytest.mark.parametrize("size", [(1, 1), (10, 3), (20, 5), (40, 10), (60, 15), (80, 24), (200, 60), (300, 9)])
@pytest.mark.parametrize("trouble", ["", "gone"])
def test_a_crowd_fits_into_any_terminal(size: tuple[int, int], trouble: str) -> None:
    """50 nodes, 625 links and a thousand slow requests."""
    width, height = size
    nodes = [(PREFILL if number < 25 else NODE) | {"name": f"node-{number}"} for number in range(50)]
    nodes[40] |= {"state": "unusable", "detail": "another model " * 20}
    links = [LINK | {"prefill": number // 25, "decode": 25 + number % 25} for number in range(625)]
    crowd = view(nodes=nodes, links=links, requests=[REQUEST | {"request_id": "r" * 200}] * 1000)
    shown = lines(Frame(crowd, trouble=trouble), width=width, height=height)
    assert len(shown) <= height
    assert max(map(len, shown)) <= width
    if size == (80, 24):
        assert any("node-40" in line for line in shown)  # what is wrong comes first
        assert any("more nodes" in line for line in shown)


def test_a_frame_for_a_file_leaves_nothing_out() -> None:
    why = "first token after 1.50 s, above 500 ms: 900 ms for its first prefill step; tried again: node-1 was lost"
    nodes = [NODE | {"name": f"node-{number}"} for number in range(50)]
    shown = drawn(Frame(view(nodes=nodes, requests=[REQUEST | {"slow": [why]}]), whole=True), width=160, height=10)
    assert all(f"node-{number} " in shown for number in range(50))
    assert set(why.split()) <= set(shown.split())


def test_names_neither_reach_the_terminal_as_codes_nor_are_read_as_markup() -> None:
    node = NODE | dict.fromkeys(("name", "address", "role", "state", "detail", "version", "revision"), HOSTILE)
    link = LINK | {"peer": HOSTILE, "decode": None, "state": HOSTILE, "transport": HOSTILE, "detail": HOSTILE}
    request = REQUEST | {"request_id": HOSTILE, "client": HOSTILE, "outcome": HOSTILE, "slow": [HOSTILE]}
    hostile = view(gateway=HOSTILE, model=HOSTILE, version=HOSTILE, nodes=[node], links=[link], requests=[request])
    plain = drawn(Frame(hostile, whole=True), width=500)
    assert all(character.isprintable() or character == "\n" for character in plain)
    assert "\\x1b[2J" in plain
    assert "[red]bold[/red]" in plain
    colored = drawn(Frame(hostile), width=500, terminal=True)
    assert "\x1b]" not in colored
    assert "\x1b[2J" not in colored
    assert "\u202e" not in colored


def test_a_view_of_another_version_is_read_as_far_as_it_goes() -> None:
    assert read_view('{"nodes": [{"name": "a", "new": 1}], "newer": {}}').nodes[0].name == "a"
    for wrong in ('{"nodes": 3}', "[]", "", '{"now_s": "soon"}', '{"now_s": NaN}', '{"now_s": null}'):
        with pytest.raises(InternalError, match=r"cannot read the gateway.s view"):
            read_view(wrong)
    assert "UTC" in drawn(Frame(view(now_s=1e300)))
    assert "UTC" in drawn(Frame(view(now_s=-1e300)))


def test_lines_are_shared_evenly_and_no_part_gets_more_than_it_needs() -> None:
    assert shares(30, [3, 5, 40]) == [3, 5, 22]
    assert shares(30, [40, 5, 40]) == [12, 5, 13]
    assert shares(2, [9, 9, 9]) == [0, 1, 1]
    assert shares(-4, [9, 9]) == [0, 0]


def test_a_whole_frame_cuts_no_value_on_a_narrow_terminal() -> None:
    """Names, states and ids are in one piece; only reasons go on in the next line, and lines may be too long."""
    nodes = [
        PREFILL | {"name": "prefill-llama-70b-0", "state": "connecting", "detail": "lost: no sign of life for 30 s"},
        NODE | {"name": "decode-llama-70b-12"},
    ]
    request = REQUEST | {"request_id": "req-0123456789abcdef0123456789abcdef"}
    frame = Frame(view(nodes=nodes, links=[LINK], requests=[request]), whole=True)
    console = Console(width=80, force_terminal=False, color_system=None)
    while (least := frame.least_width(console)) > console.width:
        console.width = least
    shown = drawn(frame, width=console.width)
    for words in ("prefill-llama-70b-0", "decode-llama-70b-12", "connecting", request["request_id"], "no sign of life"):
        assert words in " ".join(shown.split()), words
    assert "…" not in shown
    assert Frame(view(), whole=True).least_width(console) <= 80
    assert max(map(len, drawn(Frame(view(), whole=True), width=80).splitlines())) <= 80
