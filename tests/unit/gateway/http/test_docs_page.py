"""The pages / and /docs: complete, without network and script, and safe to show."""

import hashlib
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from baton.gateway.http.routes import ROUTES
from tests.unit.gateway.http.http_gateway import Answer, HttpGateway, open_http_gateway

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


class Page(HTMLParser):
    """The elements of a page: which there are, which ids they have, where they lead."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(answer.body.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found["href"]))
        elif tag == "link":
            self.loads.append(str(found["href"]))
        assert not any(name.startswith("on") or name in ("src", "style") for name in found)


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway() as opened:
        yield opened


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_page_needs_no_network_and_no_script(door: HttpGateway, path: str) -> None:
    answer = await door.call("GET", path, accept=BROWSER)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = Page(answer)
    assert page.loads == ["/ui/icon.svg"]
    assert not {"script", "iframe", "form", "object"} & set(page.tags)
    style = re.search(rb"<style>(.*?)</style>", answer.body, re.DOTALL)
    assert style is not None
    digest = b64encode(hashlib.sha256(style[1]).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_every_link_leads_somewhere(door: HttpGateway, path: str) -> None:
    page = Page(await door.call("GET", path, accept=BROWSER))
    assert len(page.ids) == len(set(page.ids))
    for href in set(page.links):
        if href.startswith("#"):
            assert href[1:] in page.ids
        else:
            assert (await door.call("GET", href)).status == 200


async def test_docs_describes_every_endpoint_and_every_field_of_its_body(door: HttpGateway) -> None:
    page = Page(await door.call("GET", "/docs"))
    for route in ROUTES:
        if not route.listed:
            continue
        anchor = re.sub("[^a-z0-9_]+", "-", f"{route.method} {route.path.replace(':path', '')}".lower()).strip("-")
        assert anchor in page.ids
        for name, field in (route.body.model_fields if route.body else {}).items():
            assert f"{anchor}.{field.alias or name}" in page.ids
    assert "object-BatonOptions.session_id" in page.ids


async def test_other_clients_of_the_root_get_json_as_ever(door: HttpGateway) -> None:
    answer = await door.call("GET", "/", accept="*/*")
    assert answer.json["name"] == "baton"
    assert answer.headers["vary"] == "accept"


async def test_the_root_shows_the_model_and_a_command_that_names_this_gateway(door: HttpGateway) -> None:
    answer = await door.call("GET", "/", accept=BROWSER, host="127.0.0.1:8000")
    text = answer.body.decode()
    assert "<code>llama</code>" in text
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in text


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_host_cannot_write_html(door: HttpGateway, path: str) -> None:
    answer = await door.call("GET", path, accept=BROWSER, host="a'&amp;")
    assert answer.status in (200, 400)
    assert b"a'&amp;/v1" not in answer.body


async def test_a_gateway_with_keys_shows_no_model_to_those_without(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[keys.alice]\nsha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n')
    async with open_http_gateway("--api-keys", str(file), asks=True) as locked:
        root = (await locked.call("GET", "/", accept=BROWSER)).body.decode()
        docs = (await locked.call("GET", "/docs", accept=BROWSER)).body.decode()
    assert "llama" not in root
    for text in (root, docs):
        assert "authorization: Bearer $BATON_API_KEY" in text
