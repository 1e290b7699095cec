"""A small Hugging Face hub on this machine: enough of its API for `huggingface_hub.snapshot_download`."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_REVISIONS = ("main", "v1", COMMIT)


@dataclass
class Hub:
    """One repository, owner/model, of one commit with the branch main and the tag v1; and owner/gated, which nobody may
    read.

    Attributes:
        sent: names of the files that were downloaded.
        authorizations: what callers sent as `Authorization`.
    """

    endpoint: str
    files: Mapping[str, bytes]
    sent: list[str] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)


@contextmanager
def hub(files: Mapping[str, bytes]) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    running = Hub(f"http://127.0.0.1:{server.server_address[1]}", files)
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": running})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.authorizations.add(self.headers.get("authorization", ""))
        if (info := _INFO.fullmatch(path)) is not None:
            if self._may_read(info[1], info[2] or "main"):
                self._send_json({"id": info[1], "sha": COMMIT, "siblings": [], "private": False, "tags": []})
        elif (tree := _TREE.fullmatch(path)) is not None:
            if self._may_read(tree[1], tree[2]):
                self._send_json(
                    [
                        {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                        for name, content in self.hub.files.items()
                    ]
                )
        elif (wanted := _FILE.fullmatch(path)) is not None and self._may_read(wanted[1], wanted[2]):
            content = self.hub.files[wanted[3]]
            if self.command == "GET":
                self.hub.sent.append(wanted[3])
            self._send(200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT})

    def _may_read(self, repository: str, revision: str) -> bool:
        """Answers with the hub's error if not."""
        if repository == "owner/gated":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "access is restricted"})
        elif repository != "owner/model":
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif revision not in _REVISIONS:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        else:
            return True
        return False

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
