"""The page /ui in a browser: a real cluster, a conversation, keyboard and touch, narrow screens, and 50 nodes.

One browser does everything in one visit (`browser.py`); each test looks at a part of what it saw.
"""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.fifty_nodes import fifty_nodes
from tests.clients.install import CLIENTS
from tests.integration.up import Up, interrupt, start_up

SCRIPT = Path(__file__).with_name("browser.py")
AXE = CLIENTS / "node" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Up]:
    """Prompts go to a prefill node, so that the page has transfers to show."""
    up = start_up("--prefill-nodes", "2", "--decode-nodes", "2", BATON_LOCAL_POLICY="strict")
    yield up
    assert interrupt(up) == 0


@pytest.fixture(scope="module")
def seen(cluster: Up, tmp_path_factory: pytest.TempPathFactory) -> Any:
    base, folder = str(cluster.line["http"]), tmp_path_factory.mktemp("pictures")
    with urllib.request.urlopen(f"{base}/ui/state") as answer:
        (folder / "large.json").write_text(json.dumps(fifty_nodes(json.load(answer))))
    browser = CLIENTS / "browser" / "bin" / "python"
    done = subprocess.run(
        [browser, SCRIPT, base, folder, AXE, folder / "large.json"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "base": base, "folder": folder}


def test_the_page_shows_every_node_and_link_and_calls_no_other_server(seen: Any) -> None:
    assert seen["small"]["nodes"] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert seen["small"]["links"] == 4
    assert seen["small"]["hand_over"].startswith("No KV has moved between nodes yet.")
    assert seen["small"]["description"].lower().startswith("demo model, trained on docstrings")
    assert not seen["errors"]
    assert all(each.startswith(f"{seen['base']}/") for each in seen["asked"])


def test_a_conversation_sends_its_turns_system_text_and_temperature(seen: Any) -> None:
    first, second = seen["talk"]["bodies"]
    assert [each["role"] for each in first["messages"]] == ["system", "user"]
    assert [each["role"] for each in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == seen["talk"]["answers"][0]
    assert (first["temperature"], first["max_tokens"], first["stream"]) == (0, 48, True)


def test_the_bytes_of_a_hand_over_are_at_the_answer_above_the_map_at_the_link_and_in_the_list(seen: Any) -> None:
    talk = seen["talk"]
    for receipt in talk["receipts"]:
        assert " → decode-" in receipt
        assert "B of KV moved in" in receipt
    assert len(talk["receipts"]) == 2
    assert talk["hand_over"].startswith("Last hand-over")
    assert any(label.endswith(("B sent", "B/s")) for label in talk["sent"])
    assert all(each.endswith("B") for each in talk["moved"][:2])


def test_stop_ends_an_answer_and_a_new_conversation_begins_with_the_focus_in_its_field(seen: Any) -> None:
    assert seen["stopped"] == {"labels": ["Stop", "Send"], "turns": 0, "focus": "text"}


def test_a_request_opens_into_its_phases_and_facts(seen: Any) -> None:
    assert {"prompt is computed", "KV is transferred", "tokens"} <= set(seen["request"]["phases"])
    assert "from prefill-" in seen["request"]["facts"]


def test_polls_keep_focus_elements_typed_text_and_opened_details(seen: Any) -> None:
    *focused, rest = seen["polls"]
    assert len(focused) == 4
    for each in focused:
        assert each["same"], each
        assert each["before"] == each["after"]
    assert rest == {"text": "half a prompt", "open": 1}


def test_tab_reaches_nodes_prompt_requests_and_charts_in_reading_order(seen: Any) -> None:
    order = seen["keyboard"]["order"]
    expected = ["pause", "prefill-0 ready", "prefill-1 ready", "decode-0 ready", "decode-1 ready", "text"]
    assert order[: len(expected)] == expected
    places = [order.index(each) for each in ("text", "send", "clear", "only-slow", "rows")]
    assert places == sorted(places)


def test_a_node_opens_by_enter_and_by_touch_and_shows_history_and_links(seen: Any) -> None:
    assert seen["keyboard"]["expanded"] == "true"
    for fact in ("address", "blocks", "weights", "← prefill-0", "← prefill-1"):
        assert fact in seen["keyboard"]["details"]
    titles = [each.partition(" over the last")[0] for each in seen["keyboard"]["pictures"]]
    assert titles == ["Requests running", "Tokens per second", "KV in use"]


def test_arrow_keys_show_the_charts_at_an_earlier_time(seen: Any) -> None:
    assert seen["slider"]["when"] == seen["slider"]["said"] != "now"


def test_a_paused_page_does_not_ask(seen: Any) -> None:
    assert seen["paused"] == {"asked": 0, "label": "Resume", "health": "paused"}


@pytest.mark.parametrize("cluster_size", ["small", "large"])
def test_axe_finds_nothing_and_nothing_is_too_wide_in_any_theme_and_width(seen: Any, cluster_size: str) -> None:
    layouts = seen[f"{cluster_size}_layouts"]
    assert [each["at"] for each in layouts][:4] == [[1280, "light"], [1280, "dark"], [390, "light"], [390, "dark"]]
    assert not [each for each in layouts if each["axe"] or each["wide"]]


def test_fifty_nodes_are_rows_of_two_tables_with_troubled_nodes_first(seen: Any) -> None:
    large = seen["large"]
    assert large["rows"] == 50
    assert large["groups"][:2] == [
        "20 prefill nodes: 19 ready, 1 draining", "30 decode nodes: 29 ready, 1 unreachable",
    ]  # fmt: skip
    assert large["first"].startswith("prefill-3")
    assert "NVIDIA H100 80GB HBM3" in large["gpus"]
    assert large["links"] == 30
    assert "refused" in large["broken"][0]
    assert large["height"] < 1100


def test_a_page_that_needs_a_key_and_a_clients_own_page_pass_axe_and_show_no_cluster(seen: Any) -> None:
    assert seen["other_callers"] == {
        "locked": {"focus": "key", "cluster": False, "axe": []},
        "own": {"focus": "", "cluster": False, "axe": []},
    }


def test_every_column_of_every_table_has_a_heading(seen: Any) -> None:
    assert len(seen["headings"]) >= 4
    for columns in seen["headings"]:
        assert all(each.startswith("col ") and len(each) > 4 for each in columns), columns


def test_pictures_of_the_page_were_taken(seen: Any) -> None:
    assert (seen["folder"] / "ui-1280-light.png").stat().st_size > 10_000
