"""As much of a Kubernetes API server as kubectl and Helm need to apply objects: discovery, get, create and merge.

It keeps objects and checks nothing. Patches are merged as JSON, which is what Kubernetes does outside of lists.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.deploy.manifests import Manifest

CLUSTER_WIDE = frozenset({"Namespace", "PriorityClass"})


class KubernetesApi:
    """The objects of a cluster, by the path of their address.

    Args:
        known: objects of all kinds that the cluster has, with which it starts.
    """

    def __init__(self, known: Iterable[Manifest]) -> None:
        self.objects: dict[str, Manifest] = {}
        self._applied: dict[str, Manifest] = {}  # by the path of an object, what server-side apply last sent
        self._groups: dict[str, dict[str, Manifest]] = {}
        for item in known:
            self.add(item)

    def add(self, item: Manifest) -> None:
        self._groups.setdefault(item["apiVersion"], {})[item["kind"]] = {
            "name": _plural(item["kind"]),
            "kind": item["kind"],
            "namespaced": item["kind"] not in CLUSTER_WIDE,
            "verbs": ["get", "list", "create", "patch", "update"],
        }
        self.objects[path_of(item)] = item

    def find(self, kind: str, name: str) -> Manifest:
        (found,) = [item for item in self.objects.values() if (item["kind"], item["metadata"]["name"]) == (kind, name)]
        return found

    def answer(self, method: str, path: str, body: Any, *, is_apply: bool = False) -> tuple[int, Manifest]:
        """The status and the body of the answer to a request.

        Args:
            is_apply: the body is of server-side apply, which takes away what the one before it had and it has not.
        """
        if method == "GET" and path in ("/api", "/apis"):
            return 200, self._versions() if path == "/api" else self._api_groups()
        if path == "/version":
            return 200, {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if method == "GET" and version in self._groups:
            resources = list(self._groups[version].values())
            return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
        elif is_apply:
            before, self._applied[path] = self._applied.get(path), body
            body = without_absent(before, body)
        elif path not in self.objects:
            return 404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
        if method != "GET":
            self.objects[path] = merge_patch(self.objects.get(path, {}), body)
        return 200, self.objects[path]

    def _versions(self) -> Manifest:
        return {"kind": "APIVersions", "versions": [version for version in self._groups if "/" not in version]}

    def _api_groups(self) -> Manifest:
        named = [version for version in self._groups if "/" in version]
        groups = [
            {
                "name": version.partition("/")[0],
                "versions": [{"groupVersion": version, "version": version.partition("/")[2]}],
                "preferredVersion": {"groupVersion": version, "version": version.partition("/")[2]},
            }
            for version in named
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


@contextmanager
def serving(server: KubernetesApi, kubeconfig: Path) -> Iterator[None]:
    """Serves on a free port of this machine, and writes a kubeconfig that leads there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = yaml.safe_load(self.rfile.read(length)) if length else None
            path = urlsplit(self.path).path.rstrip("/")
            # An empty list of schemas in protobuf: kubectl and Helm then check no field.
            status, content, form = 200, b"", "application/octet-stream"
            if path != "/openapi/v2":
                is_apply = "apply-patch" in (self.headers.get("content-type") or "")
                status, answer = server.answer(self.command, path, body, is_apply=is_apply)
                content, form = json.dumps(answer).encode(), "application/json"
            self.send_response(status)
            self.send_header("content-type", form)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PATCH = do_PUT = do_GET  # names that the handler calls

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        address = f"http://127.0.0.1:{http.server_port}"
        kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "clusters": [{"name": "here", "cluster": {"server": address}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here"}}],
                    "current-context": "here",
                }
            )
        )
        Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            http.shutdown()


def path_of(item: Manifest) -> str:
    version = item["apiVersion"]
    namespace = "" if item["kind"] in CLUSTER_WIDE else f"/namespaces/{item['metadata']['namespace']}"
    start = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{start}{namespace}/{_plural(item['kind'])}/{item['metadata']['name']}"


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: keys of the patch replace those of the target, and null removes one."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def without_absent(before: Any, now: Any) -> Any:
    """`now` as a merge patch that also removes the keys that `before` had."""
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return now
    gone = dict.fromkeys(before.keys() - now.keys())
    return gone | {key: without_absent(before.get(key), value) for key, value in now.items()}


def _plural(kind: str) -> str:
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"
