"""What /ui/state shows to whom, how large it can become, and that no name in it becomes markup."""

import asyncio
import hashlib
import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from baton.gateway.fleet.fleet import Fleet
from baton.gateway.http.call import REQUEST_ID, Context, HttpCall
from baton.gateway.http.ui.state import state
from baton.gateway.http.view import REQUESTS_SHOWN, View
from baton.gateway.observe.recent import KEPT, FinishedRequest
from baton.protos.v1 import node_status_pb2
from baton.security.authorize import UI_FILES, Right
from baton.security.identity import EVERYBODY, Caller, enter
from tests.unit.gateway.fleets import PREFILL, SmallFleet, peer, status
from tests.unit.gateway.http.http_gateway import HttpGateway, open_http_gateway, step_token

FOR_ANYBODY = {"now_s", "gateway", "model", "description", "version", "chat", "draining", "sees", "requests", "slo"}
CLUSTER = {"totals", "workers", "mixed", "nodes", "links", "charts", "history_step_s"}
MARKUP = '<img src=x onerror="alert(1)"></script>'
OTHER_CLIENT = Caller("10.0.0.9", frozenset({Right.ANYONE, Right.CLIENT}))
ALICE = Caller("alice", frozenset({Right.ANYONE, Right.CLIENT}), proved=True)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    """Flags of a gateway with the keys alice, bob and admin, each of which is its own owner's name."""
    lines = []
    for name in ("alice", "bob", "admin"):
        lines += [f"[keys.{name}]", f'sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"']
    file = tmp_path / "keys.toml"
    file.write_text("\n".join([*lines, "operator = true", ""]))
    return "--api-keys", str(file)


async def ask(door: HttpGateway, key: str | None = None) -> Any:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await door.call("GET", "/ui/state", host="localhost", **headers)
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    return answer.json


async def asked_by(caller: Caller, context: Context) -> Any:
    """The answer to this caller, as the server's handler gives it."""

    async def answer() -> bytes:
        enter(caller)
        scope = {"type": "http", "headers": [], REQUEST_ID: "r"}
        return bytes((await state(HttpCall(context, HttpRequest(scope)))).body)

    return json.loads(await asyncio.create_task(answer()))


def over(fleet: Fleet, door: HttpGateway) -> Context:
    """The context of this door, with these nodes."""
    settings, serving = door.context.settings, door.serving
    return Context(settings, serving, fleet, View(settings, serving, fleet, "g"))


async def serve(door: HttpGateway, request_id: str, **headers: str) -> None:
    """A completion of two tokens."""
    body = {"prompt": list(range(1, 65)), "max_tokens": 2}
    headers |= {"host": "localhost", "content_type": "application/json", "x_request_id": request_id}
    asked = asyncio.create_task(door.call("POST", "/v1/completions", body, **headers))
    key = await door.accept()
    door.decode.send_tokens(step_token(0), key=key)
    door.finish(1, key=key)
    assert (await asked).status == 200


def finished(client: str, request_id: str, *, error: str = "", failures: str = "") -> FinishedRequest:
    return FinishedRequest(
        ended_at_s=1e9,
        started_at_s=0.0,
        request_id=request_id,
        client=client,
        outcome="failed" if error else "finished",
        reason="",
        error=error,
        failures=failures,
        admitted_s=0.1,
        ttft_s=0.2,
        total_s=0.3,
        outputs=1,
        completion_tokens=4,
        ended=None,
        journal=None,
    )


async def test_without_keys_this_machine_sees_everything() -> None:
    async with open_http_gateway(asks=True) as door:
        await serve(door, "r1")
        shown = await ask(door)
    assert shown["sees"] == "cluster"
    assert shown.keys() == FOR_ANYBODY | CLUSTER
    assert [node["role"] for node in shown["nodes"]] == ["prefill", "decode"]
    (request,) = shown["requests"]
    assert (request["request_id"], request["outcome"], request["completion_tokens"]) == ("r1", "finished", 2)
    assert [name for name, *_ in request["phases"]][-1] == "tokens"


async def test_with_keys_a_client_sees_its_own_requests_and_the_operator_all(keys: tuple[str, str]) -> None:
    async with open_http_gateway(*keys, asks=True) as door:
        await serve(door, "of-alice", authorization="Bearer alice")
        await serve(door, "of-bob", authorization="Bearer bob")
        door.serving.recent.add(finished("bob", "lost-one", error="bob's error", failures="node-of-bob was lost"))
        alice, bob, admin = [await ask(door, key) for key in ("alice", "bob", "admin")]
        nobody = await door.call("GET", "/ui/state")
        unknown = await door.call("GET", "/ui/state", authorization="Bearer carol")
    assert (nobody.status, unknown.status) == (401, 401)
    assert [each["sees"] for each in (alice, bob, admin)] == ["own", "own", "cluster"]
    assert alice.keys() == bob.keys() == FOR_ANYBODY
    assert [each["request_id"] for each in alice["requests"]] == ["of-alice"]
    assert {each["request_id"] for each in bob["requests"]} == {"of-bob", "lost-one"}
    assert {each["client"] for each in admin["requests"]} == {"alice", "bob"}
    assert "bob" not in json.dumps(alice)
    assert "alice" not in json.dumps(bob)


async def test_how_much_other_clients_do_does_not_change_what_a_client_sees(keys: tuple[str, str]) -> None:
    seen = []
    for others in (0, 7):
        async with open_http_gateway(*keys, asks=True) as door:
            for number in range(others):
                door.serving.recent.add(finished("bob", f"b{number}"))
            door.serving.recent.add(finished("alice", "a"))
            seen.append((await ask(door, "alice"))["requests"])
    assert seen[0] == seen[1]


async def test_who_has_shown_no_key_sees_names_and_settings_only() -> None:
    """At a gateway without keys, from another machine."""
    async with open_http_gateway() as door:
        door.serving.recent.add(finished(OTHER_CLIENT.name, "r1"))
        door.serving.recent.add(finished("", "r2"))
        shown = await asked_by(OTHER_CLIENT, door.context)
    assert shown.keys() == FOR_ANYBODY
    assert (shown["sees"], shown["requests"]) == ("nothing", [])


async def test_an_answer_that_is_kept_for_one_caller_is_no_other_callers() -> None:
    async with open_http_gateway() as door:
        door.serving.recent.add(finished("bob", "r1"))
        everything = await asked_by(EVERYBODY, door.context)
        for caller in (ALICE, OTHER_CLIENT):
            assert (await asked_by(caller, door.context))["requests"] == []
        assert (await asked_by(EVERYBODY, door.context)) == everything


async def test_a_bounded_number_of_ten_thousand_requests_is_kept() -> None:
    async with open_http_gateway() as door:
        for number in range(10_000):
            door.serving.recent.add(finished("alice", f"r{number}", error="e" * 10_000))
        assert len(door.serving.recent.newest(10_000, None)) == KEPT
        shown = await asked_by(EVERYBODY, door.context)
    assert [each["request_id"] for each in shown["requests"]] == [f"r{9999 - number}" for number in range(60)]
    assert len(shown["requests"]) == REQUESTS_SHOWN
    assert len(json.dumps(shown)) < 200_000


async def test_forty_nodes_with_long_names_make_a_bounded_answer() -> None:
    fleet = SmallFleet(20, 20)
    reported = status(PREFILL, 11, *[peer(20 + number) for number in range(1, 21)])
    reported.info.name = reported.info.package_version = reported.info.cache_shape.layout = "n" * 100_000
    for each in reported.peers:
        each.name = each.detail = "p" * 100_000
    fleet.status_received(PREFILL, "p1", reported, 0.0)
    async with open_http_gateway() as door:
        shown = await asked_by(EVERYBODY, over(fleet, door))
    assert (len(shown["nodes"]), len(shown["links"])) == (40, 400)
    assert len(json.dumps(shown)) < 250_000


async def test_figures_that_are_no_numbers_are_shown_as_numbers() -> None:
    """The page formats them."""
    fleet = SmallFleet(1, 1)
    link = peer(21)
    link.gigabytes_per_s, link.latency_s = float("nan"), float("inf")
    reported = status(PREFILL, 11, link)
    reported.backlog_s = float("nan")
    fleet.status_received(PREFILL, "p1", reported, 0.0)
    async with open_http_gateway() as door:
        shown = await asked_by(EVERYBODY, over(fleet, door))
    assert (shown["links"][0]["gigabytes_per_s"], shown["links"][0]["latency_s"]) == (0.0, 0.0)
    assert shown["nodes"][0]["backlog_s"] == 0.0


async def test_a_node_on_a_cpu_has_no_gpus_and_absent_numbers_of_a_gpu_are_null() -> None:
    fleet = SmallFleet(1, 1)
    reported = status(PREFILL, 11, peer(21))
    reported.gpus.add(
        name="H100", memory_total_bytes=8, memory_used_bytes=5, busy_share=0.5, power_w=float("nan"), power_limit_w=700
    )
    reported.gpus.add(name="H100", memory_total_bytes=8, memory_used_bytes=5)
    fleet.status_received(PREFILL, "p1", reported, 0.0)
    async with open_http_gateway() as door:
        shown = await asked_by(EVERYBODY, over(fleet, door))
    first, second = shown["nodes"][0]["gpus"]
    assert (first["busy_share"], first["power_w"], first["power_limit_w"]) == (0.5, 0.0, 700.0)
    assert (second["busy_share"], second["power_w"], second["power_limit_w"]) == (None, None, None)
    assert (second["memory_used_bytes"], second["memory_total_bytes"]) == (5, 8)
    assert shown["nodes"][1]["gpus"] == []


async def test_a_node_that_reports_a_thousand_gpus_makes_a_bounded_answer() -> None:
    fleet = SmallFleet(1, 1)
    reported = status(PREFILL, 11, peer(21))
    for _ in range(1000):
        reported.gpus.add(name="g" * 10_000)
    fleet.status_received(PREFILL, "p1", reported, 0.0)
    async with open_http_gateway() as door:
        shown = await asked_by(EVERYBODY, over(fleet, door))
    assert len(json.dumps(shown)) < 60_000


async def test_markup_in_names_stays_text_and_control_characters_are_escaped() -> None:
    fleet = SmallFleet(1, 1)
    reported = status(PREFILL, 11, node_status_pb2.PeerState(incarnation=21, name=MARKUP, detail=MARKUP))
    reported.info.package_version = "1.0\x1b[2J\u202e"
    reported.info.name = MARKUP
    fleet.status_received(PREFILL, "p1", reported, 0.0)
    async with open_http_gateway() as door:
        await serve(door, MARKUP.replace(" ", ""))
        door.serving.model = replace(door.serving.model, name=MARKUP)
        shown = await asked_by(EVERYBODY, over(fleet, door))
        plain = await door.call("GET", "/ui/state")
    assert shown["model"] == shown["nodes"][0]["name"] == shown["links"][0]["detail"] == MARKUP
    assert shown["nodes"][0]["version"] == r"1.0\x1b[2J\u202e"
    assert shown["requests"][0]["request_id"] == MARKUP.replace(" ", "")
    assert plain.headers["content-type"] == "application/json"


async def test_the_page_runs_its_own_files_only_and_is_in_no_frame() -> None:
    async with open_http_gateway() as door:
        page = await door.call("GET", "/ui")
    policy = page.headers["content-security-policy"]
    for rule in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'"):
        assert rule in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("name", sorted(path.removeprefix("/ui/") for path in UI_FILES if path.endswith(".js")))
def test_scripts_make_elements_of_no_text(name: str) -> None:
    script = (resources.files("baton.gateway.http.ui") / name).read_text()
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|srcdoc|document\.write|DOMParser|\beval\b|\bFunction\("
    assert not re.findall(ways + r"|javascript:|createContextualFragment|setTimeout\(\s*[\"'`]", script)


def test_the_page_has_no_script_and_no_handler_of_its_own() -> None:
    page = (resources.files("baton.gateway.http.ui") / "page.html").read_text()
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    assert not re.findall(r"\son\w+=|style=|javascript:|https?://", page)
