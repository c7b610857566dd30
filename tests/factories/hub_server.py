"""A small hub on this machine: the endpoints of huggingface_hub that downloads and uploads use, over HTTP.

As the real one answers them (https://huggingface.co/docs/hub/api); every revision has the same files.
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from http_answers import answering
from werkzeug.wrappers import Request, Response

NO_HUB = "http://127.0.0.1:9"  # nobody listens there
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by repository and path
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})  # commits by name
    gated: set[str] = field(default_factory=set)  # repositories that nobody here may see
    logins: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by token: the answer of whoami
    repositories: dict[str, bool] = field(default_factory=dict)  # those of users, by name: whether it is private
    blobs: dict[str, bytes] = field(default_factory=dict)  # by sha256
    requests: list[str] = field(default_factory=list)  # `METHOD path`, unquoted
    refuses: dict[str, int] = field(default_factory=dict)  # status by the beginning of `METHOD path`


def login(name: str = "ann", *, role: str = "write", orgs: Mapping[str, str] = {}, **token: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": "user",
        "orgs": [{"name": each, "roleInOrg": org_role} for each, org_role in orgs.items()],
        "auth": {"type": "access_token", "accessToken": {"displayName": "laptop", "role": role, **token}},
    }


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    def answer(request: Request) -> Response:
        hub.requests.append(f"{request.method} {request.path}")
        return _respond(hub, request)

    with answering(answer) as hub.url:
        yield hub


def ask_hub(program: str, *words: str, home: Path, endpoint: str = NO_HUB, **environment: str) -> list[Any]:
    """The JSON list that a program prints last, whose hub is at `endpoint`; it sees no setting of a hub but these.

    huggingface_hub reads its settings when it is imported, so that a process can ask one endpoint only.
    """
    names = {name for name in os.environ if not name.startswith("HF_") and "PROXY" not in name.upper()}
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HOME": str(home), **environment}
    settings = {name: os.environ[name] for name in names} | settings
    argv = [sys.executable, "-c", program, *words]
    answer = subprocess.run(argv, env=settings, capture_output=True, text=True, check=False, timeout=100)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


def _respond(hub: Hub, request: Request) -> Response:
    for beginning, status in hub.refuses.items():
        if f"{request.method} {request.path}".startswith(beginning):
            return _json({"error": "refused"}, status)
    path = request.path
    if request.method == "PUT":
        hub.blobs[path.rsplit("/", 1)[-1]] = request.get_data()
        return _json({})
    if path in {"/api/whoami-v2", "/api/validate-yaml", "/api/repos/create"} or path.endswith("/lfs/objects/batch"):
        return _account(hub, request)
    parts = path.strip("/").removeprefix("api/").removeprefix("models/").removeprefix("datasets/").split("/")
    repository, rest = "/".join(parts[:2]), parts[2:]
    is_upload = rest[:1] in (["preupload"], ["commit"])
    if (is_upload or hub.repositories.get(repository)) and _token(request) not in hub.logins:
        return _unknown_token()
    if repository in hub.gated:
        return _json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
    if repository not in {*hub.files, *hub.repositories}:
        return _json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
    return _upload(hub, request, repository, rest) if is_upload else _download(hub, request, repository, rest)


def _account(hub: Hub, request: Request) -> Response:
    if _token(request) not in hub.logins:
        return _unknown_token()
    who, path = hub.logins[_token(request)], request.path
    if path == "/api/whoami-v2":
        return _json(who)
    if path == "/api/validate-yaml":
        return _json({"errors": [], "warnings": []})
    wish = request.get_json()
    if path == "/api/repos/create":
        name = f"{wish.get('organization') or who['name']}/{wish['name']}"
        hub.repositories.setdefault(name, wish.get("private") is True or wish.get("visibility") == "private")
        return _json({"url": f"{hub.url}/{name}", "name": name})
    objects = [{**each, "actions": {"upload": {"href": f"{hub.url}/blobs/{each['oid']}"}}} for each in wish["objects"]]
    return _json({"transfer": "basic", "objects": objects})


def _upload(hub: Hub, request: Request, repository: str, rest: list[str]) -> Response:
    if rest[0] == "preupload":
        modes = {each["path"]: each["path"].endswith((".safetensors", ".data")) for each in request.get_json()["files"]}
        files = [{"path": path, "uploadMode": "lfs" if is_large else "regular"} for path, is_large in modes.items()]
        return _json({"files": [{**each, "shouldIgnore": False} for each in files]})
    for each in map(json.loads, request.get_data().splitlines()):
        if each["key"] != "header":
            value = each["value"]
            content = base64.b64decode(value["content"]) if each["key"] == "file" else hub.blobs[value["oid"]]
            hub.files.setdefault(repository, {})[value["path"]] = content
    url = f"{hub.url}/{repository}/commit/{COMMIT}"
    return _json({"success": True, "commitOid": COMMIT, "commitUrl": url})


def _download(hub: Hub, request: Request, repository: str, rest: list[str]) -> Response:
    kind, revision = rest[0] if rest else "revision", unquote(rest[1]) if len(rest) > 1 else "main"
    commit = revision if revision in hub.revisions.values() else hub.revisions.get(revision)
    if commit is None:
        return _json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
    files, name = hub.files.get(repository, {}), "/".join(rest[2:])
    if kind == "resolve":
        return _file(files, name, commit, request)
    entries = [
        {"type": "file", "path": path, "size": len(content), "oid": _digest(content)} for path, content in files.items()
    ]
    if kind == "tree":
        return _json([each for each in entries if not name or str(each["path"]).startswith(f"{name}/")])
    if kind == "paths-info":
        return _json([each for each in entries if each["path"] in request.form.getlist("paths")])
    assert kind == "revision", request.path
    siblings = [{"rfilename": path} | ({"size": len(files[path])} if "blobs" in request.args else {}) for path in files]
    described = {"_id": "1", "id": repository, "modelId": repository, "sha": commit, "siblings": siblings}
    return _json({**described, "tags": [], "downloads": 0, "private": hub.repositories.get(repository, False)})


def _file(files: Mapping[str, bytes], name: str, commit: str, request: Request) -> Response:
    if name not in files:
        return _json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
    content = files[name]
    response = Response(content, headers={"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit})
    return response.make_conditional(request, accept_ranges=True, complete_length=len(content))


def _json(answer: object, status: int = 200, headers: Mapping[str, str] = {}) -> Response:
    return Response(json.dumps(answer), status, headers, content_type="application/json")


def _token(request: Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _unknown_token() -> Response:
    return _json({"error": "Invalid credentials in Authorization header"}, 401)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
