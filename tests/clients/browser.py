"""Opens a gateway's page in Chromium and does what its reader does; prints what was seen as JSON.

Runs in the environment `browser` of `.clients`, which has playwright and nothing of ours.

    python browser.py http://127.0.0.1:8000 FOLDER
"""

import json
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-default-apps",
]  # fmt: skip
SIZE = {"width": 1360, "height": 860}
LIMIT_MS = 120_000
PROMPTS = 6


def main(base: str, folder: str) -> None:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        browser = playwright.chromium.launch_persistent_context(
            profile, executable_path="/usr/bin/chromium", args=FLAGS, viewport=SIZE, color_scheme="light"
        )
        page = browser.new_page()
        page.set_default_timeout(LIMIT_MS)
        asked: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        seen = look(page, base, Path(folder))
        browser.close()
    print(json.dumps({**seen, "asked": sorted(set(asked)), "errors": errors}))


def look(page: Page, base: str, folder: Path) -> dict[str, object]:
    page.goto(f"{base}/ui")
    page.locator(".node").first.wait_for()
    for number in range(PROMPTS):
        page.fill("#text", f"Once upon a time there was a small file number {number}. " * (4 + 9 * (number % 3)))
        page.fill("#most", str(24 + 16 * number))
        page.click("#send")
        page.locator("#send:enabled").wait_for()
        page.locator(".row .id.own").nth(number).wait_for()
    page.locator(".row").first.click()
    page.locator(".detail .phase").first.wait_for()
    page.wait_for_function("document.querySelector('#ttft path')?.getAttribute('d')?.length > 20")
    seen = {
        "nodes": page.locator(".node b").all_inner_texts(),
        "links": page.locator("#links path.ready").count(),
        "answer": page.inner_text("#answer"),
        "phases": page.locator(".detail .phase span:first-child").all_inner_texts(),
        "slow": page.locator(".why").all_inner_texts(),
    }
    page.locator(".gbs").first.wait_for()
    page.screenshot(path=folder / "ui-light.png", full_page=True)
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=folder / "ui-dark.png", full_page=True)
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
