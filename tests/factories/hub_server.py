"""A small hub on this machine: the endpoints of huggingface_hub that downloads and uploads use, over HTTP.

As the real one answers them (https://huggingface.co/docs/hub/api): what a repository is, its files at a revision and
parts of them, who a token is, making a repository, how each file goes up, the LFS batch of Git
(https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md), a commit as lines of JSON.

    with serving(Hub(files={"org/name": {"config.json": b"{}"}})) as hub: ...  # hub.url, hub.requests

Models and data sets are told apart by their address alone, and every revision has the same files.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server knows and was given."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by repository and path
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})  # commits by name
    gated: set[str] = field(default_factory=set)  # repositories that nobody here may see
    logins: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by token: the answer of whoami
    repositories: dict[str, bool] = field(default_factory=dict)  # those of users, by name: whether it is private
    blobs: dict[str, bytes] = field(default_factory=dict)  # by sha256
    requests: list[str] = field(default_factory=list)  # `METHOD path`, unquoted
    refuses: dict[str, int] = field(default_factory=dict)  # status by the beginning of `METHOD path`


class Answer(NamedTuple):
    """Of the server to one request."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}


class Request(NamedTuple):
    """One request, its path unquoted and without a query."""

    method: str
    path: str
    query: str
    body: bytes
    headers: Message

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")


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

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path, _, query = self.path.partition("?")
            request = Request(self.command, unquote(path), query, self._body(), self.headers)
            hub.requests.append(f"{request.method} {request.path}")
            status, body, headers = _respond(hub, request)
            self.send_response(status)
            sizes = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            for name, value in {**sizes, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

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
    server.daemon_threads = True  # a client may keep its connection open
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _respond(hub: Hub, request: Request) -> Answer:
    for beginning, status in hub.refuses.items():
        if f"{request.method} {request.path}".startswith(beginning):
            return _json({"error": "refused"}, status)
    path = request.path
    if request.method == "PUT":
        hub.blobs[path.rsplit("/", 1)[-1]] = request.body
        return _json({})
    if path in {"/api/whoami-v2", "/api/validate-yaml", "/api/repos/create"} or path.endswith("/lfs/objects/batch"):
        return _account(hub, request)
    parts = path.strip("/").removeprefix("api/").removeprefix("models/").removeprefix("datasets/").split("/")
    repository, rest = "/".join(parts[:2]), parts[2:]
    is_upload = rest[:1] in (["preupload"], ["commit"])
    if (is_upload or hub.repositories.get(repository)) and request.token not in hub.logins:
        return _unknown_token()
    if repository in hub.gated:
        return _json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
    if repository not in {*hub.files, *hub.repositories}:
        return _json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
    return _upload(hub, request, repository, rest) if is_upload else _download(hub, request, repository, rest)


def _account(hub: Hub, request: Request) -> Answer:
    if request.token not in hub.logins:
        return _unknown_token()
    who, path = hub.logins[request.token], request.path
    if path == "/api/whoami-v2":
        return _json(who)
    if path == "/api/validate-yaml":
        return _json({"errors": [], "warnings": []})
    wish = json.loads(request.body)
    if path == "/api/repos/create":
        name = f"{wish.get('organization') or who['name']}/{wish['name']}"
        hub.repositories.setdefault(name, wish.get("private") is True or wish.get("visibility") == "private")
        return _json({"url": f"{hub.url}/{name}", "name": name})
    objects = [{**each, "actions": {"upload": {"href": f"{hub.url}/blobs/{each['oid']}"}}} for each in wish["objects"]]
    return _json({"transfer": "basic", "objects": objects})


def _upload(hub: Hub, request: Request, repository: str, rest: list[str]) -> Answer:
    if rest[0] == "preupload":
        paths = [each["path"] for each in json.loads(request.body)["files"]]
        return _json({"files": [{"path": path, "uploadMode": _mode(path), "shouldIgnore": False} for path in paths]})
    for each in map(json.loads, request.body.splitlines()):
        if each["key"] != "header":
            value = each["value"]
            content = base64.b64decode(value["content"]) if each["key"] == "file" else hub.blobs[value["oid"]]
            hub.files.setdefault(repository, {})[value["path"]] = content
    url = f"{hub.url}/{repository}/commit/{COMMIT}"
    return _json({"success": True, "commitOid": COMMIT, "commitUrl": url})


def _download(hub: Hub, request: Request, repository: str, rest: list[str]) -> Answer:
    kind, revision = rest[0] if rest else "revision", unquote(rest[1]) if len(rest) > 1 else "main"
    commit = revision if revision in hub.revisions.values() else hub.revisions.get(revision)
    if commit is None:
        return _json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
    files, name = hub.files.get(repository, {}), "/".join(rest[2:])
    if kind == "resolve":
        return _file(files, name, commit, request.headers.get("Range"))
    entries = [
        {"type": "file", "path": path, "size": len(content), "oid": _digest(content)} for path, content in files.items()
    ]
    if kind == "tree":
        return _json([each for each in entries if not name or str(each["path"]).startswith(f"{name}/")])
    if kind == "paths-info":
        asked = parse_qs(request.body.decode()).get("paths", [])
        return _json([each for each in entries if each["path"] in asked])
    assert kind == "revision", request.path
    has_sizes = "blobs" in parse_qs(request.query)
    siblings = [{"rfilename": path} | ({"size": len(files[path])} if has_sizes else {}) for path in files]
    described = {"_id": "1", "id": repository, "modelId": repository, "sha": commit, "siblings": siblings}
    return _json({**described, "tags": [], "downloads": 0, "private": hub.repositories.get(repository, False)})


def _file(files: Mapping[str, bytes], name: str, commit: str, wanted: str | None) -> Answer:
    if name not in files:
        return _json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
    content = files[name]
    headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
    if wanted is None:
        return Answer(200, content, headers)
    begin, _, end = wanted.removeprefix("bytes=").partition("-")
    first = int(begin) if begin else len(content) - int(end)
    last = min(int(end) if begin and end else len(content) - 1, len(content) - 1)
    return Answer(206, content[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"})


def _json(answer: object, status: int = 200, headers: Mapping[str, str] = {}) -> Answer:
    return Answer(status, json.dumps(answer).encode(), headers)


def _unknown_token() -> Answer:
    return _json({"error": "Invalid credentials in Authorization header"}, 401)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".data")) else "regular"
