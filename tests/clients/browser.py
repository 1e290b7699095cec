"""Opens a gateway's page in Chromium and does what its reader does; prints what was seen as JSON.

Runs in the environment `browser` of `.clients`, which has playwright and nothing of ours.

    python browser.py http://127.0.0.1:8000 FOLDER axe.min.js large.json

`large.json` has the nodes and links of a large cluster, which the page gets at the end in place of the real ones.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, sync_playwright

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-default-apps",
]  # fmt: skip
WIDTHS = (1280, 390)
# Each side of every width at which the layout changes, and the least width that the web's guidelines ask for.
MORE_WIDTHS = (1600, 1241, 1240, 1121, 1120, 841, 840, 781, 780, 421, 420, 351, 350, 320)
THEMES = ("light", "dark")
LIMIT_MS = 120_000
SYSTEM = "Answer as a docstring of Python's standard library, and explain what the function returns."
OPERATORS_ONLY = ("totals", "mixed", "nodes", "links", "charts", "history_step_s")
PROMPTS = ("Once upon a time there was a small file. " * 12, "And what did the file do then? " * 20)


def main(base: str, folder: str, axe: str, large_cluster: str) -> None:
    asked: list[str] = []
    errors: list[str] = []
    with opened(base, asked, errors) as page:
        seen: dict[str, Any] = {"small": look(page), "talk": talk(page), "stopped": stop(page)}
        seen["request"] = open_request(page)
        seen["polls"] = polls(page)
        seen["keyboard"] = keyboard(page)
        seen["slider"] = slider(page)
        seen["paused"] = pause(page)
        seen["small_layouts"] = layouts(page, Path(axe).read_text(), Path(folder), "ui")
        state = page.request.get(f"{base}/ui/state").json() | json.loads(Path(large_cluster).read_text())
        page.route("**/ui/state", answering({"json": state}))
        page.reload()
        page.locator("#prefills tr[data-node]").first.wait_for()
        seen["large"] = large(page)
        seen["large_layouts"] = layouts(page, Path(axe).read_text(), Path(folder), "ui-large")
        seen["headings"] = page.locator("table").evaluate_all(
            "tables => tables.map(t => [...t.tHead.rows[0].cells].map(c => c.scope + ' ' + c.textContent))"
        )
        asked_before, errors_before = list(asked), list(errors)  # a refused call is an error to a browser
        seen["other_callers"] = other_callers(page, Path(axe).read_text(), state)
    print(json.dumps({**seen, "asked": sorted(set(asked_before)), "errors": errors_before}))


@contextmanager
def opened(base: str, asked: list[str], errors: list[str]) -> Iterator[Page]:
    """The page in a new browser with a touch screen; records what it asks for and its errors."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        browser = playwright.chromium.launch_persistent_context(
            profile, executable_path="/usr/bin/chromium", args=FLAGS, has_touch=True, color_scheme="light"
        )
        page = browser.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.set_viewport_size({"width": WIDTHS[0], "height": 860})
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(f"{base}/ui")
        page.locator("[data-node]").first.wait_for()
        yield page
        browser.close()


def look(page: Page) -> dict[str, Any]:
    page.locator("#lines path.ready").nth(3).wait_for(state="attached")
    return {
        "nodes": page.locator(".node .name .text").all_inner_texts(),
        "links": page.locator("#lines path.ready").count(),
        "hand_over": page.inner_text("#hand-over"),
        "description": page.inner_text("#description"),
    }


def talk(page: Page) -> dict[str, Any]:
    """Two turns, with a system text and a temperature."""
    page.locator("summary").click()
    page.fill("#system", SYSTEM)
    page.fill("#temperature", "0")
    page.fill("#most", "48")
    bodies = []
    for number, prompt in enumerate(PROMPTS):
        page.fill("#text", prompt)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.keyboard.press("Control+Enter")
        bodies.append(sent.value.post_data_json)
        page.locator(".turn.model[aria-busy=false] .figures span").nth(2 * number + 1).wait_for()
    page.locator("#hand-over", has_text="KV moved from").wait_for()
    page.locator("#lines text.moving, #lines text.label", has_text="B").first.wait_for()
    return {
        "bodies": bodies,
        "answers": page.locator(".turn.model .said").all_inner_texts(),
        "receipts": page.locator(".turn.model .moved").all_inner_texts(),
        "hand_over": page.inner_text("#hand-over"),
        "sent": page.locator("#lines .label").all_text_contents(),
        "moved": page.locator("#rows tbody tr td:nth-child(4)").all_inner_texts(),
    }


def stop(page: Page) -> dict[str, Any]:
    """Stops a long answer after its first text, and begins a new conversation."""
    # The model must not end the answer before the click does.
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=endless(route)))
    page.fill("#most", "2000")
    page.fill("#text", "Write a long story about files.")
    page.click("#send")
    last = page.locator(".turn.model").last
    page.locator(".turn.model[aria-busy=true] .said", has_text="e").wait_for()
    label = page.inner_text("#send")
    page.click("#send")
    last.locator(".figures", has_text="Stopped").wait_for()
    after = page.inner_text("#send")
    page.unroute("**/v1/chat/completions")
    page.click("#clear")
    return {"labels": [label, after], "turns": page.locator(".turn").count(), "focus": focus(page)}


def endless(route: Route) -> str:
    """The page's request, with which a model goes on to the largest number of tokens."""
    return json.dumps({**(route.request.post_data_json or {}), "ignore_eos": True})


def open_request(page: Page) -> dict[str, Any]:
    page.locator("#rows .tag.remote").first.click()
    page.locator("#rows .detail .phase").first.wait_for()
    return {
        "phases": page.locator("#rows .phase span:first-child").all_inner_texts(),
        "facts": page.locator("#rows .detail dl").inner_text(),
        "slow": page.locator(".why").all_inner_texts(),
    }


def focus(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))


def polls(page: Page) -> list[dict[str, Any]]:
    """What three polls leave of the focus, of the element that has it, and of the texts that were typed."""
    found = []
    page.fill("#text", "half a prompt")
    for selector in ("#prefills .name", "#rows .name", "#text", "#back"):
        page.focus(selector)
        page.evaluate("document.activeElement.marked = true")
        before = focus(page)
        for _ in range(3):
            with page.expect_response("**/ui/state"):
                pass
        kept = page.evaluate("document.activeElement.marked === true")
        found.append({"of": selector, "before": before, "after": focus(page), "same": kept})
    return [*found, {"text": page.input_value("#text"), "open": page.locator("#rows .detail").count()}]


def keyboard(page: Page) -> dict[str, Any]:
    """The order of Tab from the top of the page, and what Enter and a touch do at a node."""
    page.evaluate("document.activeElement.blur()")
    page.evaluate("getSelection().removeAllRanges(), scrollTo(0, 0)")
    page.focus("#pause")
    order = []
    for _ in range(16):
        order.append(focus(page).strip())
        page.keyboard.press("Tab")
    node = page.locator("#decodes .node").first
    node.locator(".name").focus()
    page.keyboard.press("Enter")
    node.locator(".detail").wait_for()
    opened_by_key = node.locator(".name").get_attribute("aria-expanded")
    details = node.locator(".detail").inner_text()
    page.keyboard.press("Space")
    node.locator(".detail").wait_for(state="detached")
    page.locator("#prefills .node").first.tap()
    page.locator("#prefills .detail").wait_for()
    pictures = page.locator("#prefills .detail svg").evaluate_all("all => all.map(e => e.getAttribute('aria-label'))")
    return {"order": order, "expanded": opened_by_key, "details": details, "pictures": pictures}


def slider(page: Page) -> dict[str, Any]:
    """The charts' values at an earlier time, by the arrow keys."""
    page.focus("#back")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    return {"when": page.inner_text("#when"), "said": page.get_attribute("#back", "aria-valuetext")}


def pause(page: Page) -> dict[str, Any]:
    """A paused page does not ask, even when it comes into sight again."""
    asked: list[str] = []
    with page.expect_response("**/ui/state"):
        pass
    page.click("#pause")
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    found = {"asked": len(asked), "label": page.inner_text("#pause"), "health": page.inner_text("#health")}
    with page.expect_response("**/ui/state"):
        page.click("#pause")
    return found


def layouts(page: Page, axe: str, folder: Path, name: str) -> list[dict[str, Any]]:
    """For each width and theme: what axe finds, and what reaches beyond its place. Details of a node are open."""
    found = []
    page.locator("#map .name[aria-expanded=false]").last.click()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 860})
        for theme in THEMES:
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            with page.expect_response("**/ui/state"):
                pass
            found.append({"at": [width, theme], "wide": too_wide(page), "axe": violations(page, axe)})
            page.screenshot(path=folder / f"{name}-{width}-{theme}.png", full_page=True)
    for width in MORE_WIDTHS:
        page.set_viewport_size({"width": width, "height": 860})
        found.append({"at": [width, ""], "wide": too_wide(page), "axe": []})
    page.set_viewport_size({"width": WIDTHS[0], "height": 860})
    return found


def too_wide(page: Page) -> list[str]:
    """The elements whose content reaches beyond them to the side."""
    places = "[document.documentElement, ...document.querySelectorAll('.card, .node, .column, .scroll, #rows')]"
    wide = "e => e.clientWidth && e.scrollWidth > e.clientWidth + 1"
    return list(page.evaluate(f"{places}.filter({wide}).map(e => e.id || e.className || e.tagName)"))


def violations(page: Page, axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("axe.run()")["violations"]
    return [f"{each['id']}: {[node['target'] for node in each['nodes']]}" for each in found]


def answering(answer: dict[str, Any]) -> Callable[[Route], None]:
    """Answers a request of the page in the gateway's place."""
    return lambda route: route.fulfill(**answer)


def other_callers(page: Page, axe: str, state: dict[str, Any]) -> dict[str, Any]:
    """The page of a gateway with keys before a key is there, and that of a client who sees its own requests."""
    found = {}
    own = {name: value for name, value in state.items() if name not in OPERATORS_ONLY} | {"sees": "own"}
    answers: dict[str, dict[str, Any]] = {"locked": {"status": 401, "json": {}}, "own": {"json": own}}
    for name, answer in answers.items():
        page.unroute("**/ui/state")
        page.route("**/ui/state", answering(answer))
        page.reload()
        page.locator("#locked" if name == "locked" else "#rows table").wait_for()
        found[name] = {
            "focus": focus(page).strip() if name == "locked" else "",
            "cluster": page.locator("#cluster").is_visible(),
        }
        found[name]["axe"] = []
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            found[name]["axe"] += violations(page, axe)
    return found


def large(page: Page) -> dict[str, Any]:
    """The page of 50 nodes."""
    first = page.locator("#prefills tbody tr").first
    height = page.locator("#cluster").bounding_box()
    first.locator(".name").press("Enter")
    page.locator("#prefills .detail").wait_for()
    gpus = page.locator("#prefills .detail table").first.inner_text()
    links = page.locator("#prefills .detail .scroll tbody tr").count()
    first.locator(".name").press("Enter")
    return {
        "rows": page.locator("#map tr[data-node]").count(),
        "groups": page.locator("#map h3").all_inner_texts(),
        "first": first.inner_text(),
        "gpus": gpus,
        "links": links,
        "broken": page.locator("#link-list tbody tr").all_inner_texts(),
        "height": height["height"] if height else 0,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
