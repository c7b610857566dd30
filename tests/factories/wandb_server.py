"""A stand-in for wandb's server on this machine: keeps runs, their history, configs, summaries, alerts and views.

It answers what wandb-core asks, and nothing else; a resumed run is told how many lines of history there are, and which
step was the last.
"""

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

ENTITY = "somebody"


@dataclass
class StoredRun:
    """What the server has of one run."""

    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)  # by offset
    names: set[str] = field(default_factory=set)
    exit_codes: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self.history[offset] for offset in sorted(self.history)]


class WandbServer(ThreadingHTTPServer):
    """Listens on a free port of this machine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, StoredRun] = {}
        self.alerts: list[dict[str, Any]] = []
        self.views: list[dict[str, Any]] = []
        self.operations: list[str] = []
        self.projects: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        named = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = "" if named is None else named.group(1)
        self.operations.append(name)
        found = _ANSWERS.get(name)
        return {} if found is None else found(self, variables)

    def store(self, run: StoredRun, content: dict[str, Any]) -> None:
        for name, chunk in (content.get("files") or {}).items():
            lines = [json.loads(line) for line in chunk["content"]] if name.endswith((".jsonl", ".json")) else []
            if name == "wandb-history.jsonl":
                for place, row in enumerate(lines):
                    run.history[chunk["offset"] + place] = row
            if name == "wandb-summary.json" and lines:
                run.summary = lines[-1]
        if content.get("complete") is not None:
            run.exit_codes.append(content["exitcode"])


def _upsert(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    identity = variables["name"]
    inserted = identity not in server.runs
    server.projects.add(variables["project"])
    run = server.runs.setdefault(identity, StoredRun())
    if variables.get("config"):
        run.config = json.loads(variables["config"])
    if variables.get("displayName"):
        run.names.add(variables["displayName"])
    project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": ENTITY}}
    bucket = {
        "id": f"storage-{identity}",
        "name": identity,
        "displayName": variables.get("displayName") or identity,
        "description": None,
        "config": variables.get("config"),
        "sweepName": None,
        "project": project,
        "historyLineCount": len(run.history),
    }
    return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}


def _resume(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    run = server.runs.get(variables["name"])
    if run is None:
        return {"model": None}
    rows = run.rows
    bucket = {
        "id": f"storage-{variables['name']}",
        "name": variables["name"],
        "summaryMetrics": json.dumps(run.summary),
        "displayName": variables["name"],
        "logLineCount": 0,
        "historyLineCount": len(rows),
        "eventsLineCount": 0,
        "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]),
        "eventsTail": "[]",
        "config": json.dumps(run.config),
        "tags": [],
        "wandbConfig": json.dumps({"t": {}}),
    }
    return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": ENTITY}, "bucket": bucket}}


def _viewer(_server: WandbServer, _variables: dict[str, Any]) -> dict[str, Any]:
    return {
        "viewer": {
            "id": "v", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}, "email": None,
            "name": ENTITY, "admin": False,
        }
    }  # fmt: skip


def _alert(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    server.alerts.append(variables)
    return {"notifyScriptableRunAlert": {"success": True}}


def _view(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    server.views.append(variables)
    return {"upsertView": {"view": {"id": "view-1", "name": variables["name"]}, "inserted": True}}


def _files(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    files = [{"name": name, "uploadUrl": f"{server.url}/upload/{name}"} for name in variables["files"]]
    return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}


def _find_view(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    known = [view for view in server.views if view["name"] == variables["viewName"]]
    edges = [{"node": {"id": "view-1"}}] if known else []
    return {"project": {"allViews": {"edges": edges}} if variables["name"] in server.projects else None}


_ANSWERS = {
    "FindView": _find_view,
    "OwnEntity": lambda _server, _variables: {"viewer": {"entity": ENTITY}},
    "CreateRunFiles": _files,
    "UpsertBucket": _upsert,
    "RunResumeStatus": _resume,
    "Viewer": _viewer,
    "NotifyScriptableRunAlert": _alert,
    "UpsertView": _view,
}


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self._body()
        if self.path.endswith("/file_stream"):
            identity = self.path.split("/")[-2]
            self.server.store(self.server.runs.setdefault(identity, StoredRun()), json.loads(body))
            self._say({})
            return
        if not self.path.endswith("/graphql"):  # what wandb counts of itself
            self._say({})
            return
        asked = json.loads(body)
        self._say({"data": self.server.answer(asked["query"], asked.get("variables") or {})})

    def do_PUT(self) -> None:
        self._body()
        self._say({})

    def do_GET(self) -> None:
        self._say({})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        else:
            body = b"".join(self._chunks())
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _chunks(self) -> Iterator[bytes]:
        while length := int(self.rfile.readline().partition(b";")[0], 16):
            yield self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()

    def _say(self, content: dict[str, Any]) -> None:
        encoded = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the class above
        pass


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server while the block runs."""
    with WandbServer() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
