"""A small hub on this machine: the endpoints of huggingface_hub that an upload uses, over HTTP.

As the real one answers them (https://huggingface.co/docs/hub/api): who a token is, what a repository is, making one,
how each file goes up, the LFS batch of Git (https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md), a commit
as lines of JSON.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "a" * 40


@dataclass
class Hub:
    """What the server knows and was given."""

    url: str = ""
    logins: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by token: the answer of whoami
    repositories: dict[str, bool] = field(default_factory=dict)  # by name: whether it is private
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by repository and path
    blobs: dict[str, bytes] = field(default_factory=dict)  # by sha256
    requests: list[str] = field(default_factory=list)
    refuses: dict[str, int] = field(default_factory=dict)  # status by the beginning of `METHOD path`


def login(name: str = "ann", *, role: str = "write", orgs: Mapping[str, str] = {}, **token: Any) -> dict[str, Any]:
    """The answer of whoami."""
    return {
        "name": name,
        "type": "user",
        "orgs": [{"name": each, "roleInOrg": org_role} for each, org_role in orgs.items()],
        "auth": {"type": "access_token", "accessToken": {"displayName": "laptop", "role": role, **token}},
    }


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub, listening until the end."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def do_PUT(self) -> None:
            self._answer("PUT")

        def _answer(self, method: str) -> None:
            body = self._body()
            line = f"{method} {self.path.partition('?')[0]}"
            hub.requests.append(line)
            status, answer = _respond(hub, line, body, self.headers.get("Authorization", "").removeprefix("Bearer "))
            content = json.dumps(answer).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _respond(hub: Hub, line: str, body: bytes, token: str) -> tuple[int, Any]:
    for beginning, status in hub.refuses.items():
        if line.startswith(beginning):
            return status, {"error": "refused"}
    method, path = line.split(" ", 1)
    if method == "PUT":
        hub.blobs[path.rsplit("/", 1)[-1]] = body
        return 200, {}
    if token not in hub.logins:
        return 401, {"error": "Invalid credentials in Authorization header"}
    if path == "/api/whoami-v2":
        return 200, hub.logins[token]
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if path == "/api/repos/create":
        wish = json.loads(body)
        name = f"{wish.get('organization') or hub.logins[token]['name']}/{wish['name']}"
        is_private = wish.get("private") is True or wish.get("visibility") == "private"
        hub.repositories.setdefault(name, is_private)
        return 200, {"url": f"{hub.url}/{name}", "name": name}
    if path.endswith(".git/info/lfs/objects/batch"):
        objects = [
            {**each, "actions": {"upload": {"href": f"{hub.url}/blobs/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}
    _, _, _, owner, name, *rest = path.split("/")
    repository = f"{owner}/{name}"
    if repository not in hub.repositories:
        return 404, {"error": "Repository not found"}
    if not rest or rest[0] == "revision":
        private = hub.repositories[repository]
        return 200, {"_id": "1", "id": repository, "private": private, "sha": COMMIT, "siblings": [], "tags": []}
    if rest[0] == "preupload":
        modes = [
            {"path": each["path"], "uploadMode": _mode(each["path"]), "shouldIgnore": False}
            for each in json.loads(body)["files"]
        ]
        return 200, {"files": modes}
    assert rest[0] == "commit", path
    for each in map(json.loads, body.splitlines()):
        if each["key"] != "header":
            value = each["value"]
            content = base64.b64decode(value["content"]) if each["key"] == "file" else hub.blobs[value["oid"]]
            hub.files.setdefault(repository, {})[value["path"]] = content
    return 200, {"success": True, "commitOid": COMMIT, "commitUrl": f"{hub.url}/{repository}/commit/{COMMIT}"}


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".data")) else "regular"
