"""A stand-in for wandb's server on this machine: keeps runs, their history, configs, summaries and views."""

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from http_answers import answering
from werkzeug.wrappers import Request, Response

ENTITY = "somebody"


@dataclass
class StoredRun:
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)  # by offset
    names: set[str] = field(default_factory=set)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self.history[offset] for offset in sorted(self.history)]


@dataclass
class WandbServer:
    url: str = ""
    runs: dict[str, StoredRun] = field(default_factory=dict)
    views: list[dict[str, Any]] = field(default_factory=list)

    def run(self, identity: str) -> StoredRun:
        return self.runs.setdefault(identity, StoredRun())

    def store(self, run: StoredRun, content: dict[str, Any]) -> None:
        for name, chunk in (content.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                run.history |= dict(enumerate(map(json.loads, chunk["content"]), start=chunk["offset"]))
            elif name == "wandb-summary.json" and chunk["content"]:
                run.summary = json.loads(chunk["content"][-1])


def _upsert(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    identity = variables["name"]
    inserted = identity not in server.runs
    run = server.run(identity)
    if variables.get("config"):
        run.config = json.loads(variables["config"])
    if variables.get("displayName"):
        run.names.add(variables["displayName"])
    names = {"id": f"storage-{identity}", "name": identity, "displayName": variables.get("displayName") or identity}
    project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": ENTITY}}
    content = {"config": variables.get("config"), "historyLineCount": len(run.history)}
    bucket = {**names, **content, "project": project}
    return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}


def _resume(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    run, name = server.runs.get(variables["name"]), variables["name"]
    if run is None:
        return {"model": None}
    tail = json.dumps([json.dumps(row) for row in run.rows[-1:]])
    names = {"id": f"storage-{name}", "name": name, "displayName": name, "tags": [], "config": json.dumps(run.config)}
    history = {"historyLineCount": len(run.rows), "historyTail": tail, "summaryMetrics": json.dumps(run.summary)}
    events = {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "wandbConfig": json.dumps({"t": {}})}
    bucket = {**names, **history, **events}
    return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": ENTITY}, "bucket": bucket}}


def _answer(server: WandbServer, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
    match operation:
        case "UpsertBucket":
            return _upsert(server, variables)
        case "RunResumeStatus":
            return _resume(server, variables)
        case "Viewer" | "GetDefaultEntity":
            return {"viewer": {"id": "v", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}}
        case "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{server.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        case "UpsertView2":
            server.views.append(variables)
            return {"upsertView": {"view": {"id": "view-1", "name": variables["name"]}, "inserted": True}}
    return {}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()

    def answer(request: Request) -> Response:
        body = request.get_data()
        body = gzip.decompress(body) if request.headers.get("Content-Encoding") == "gzip" else body
        content: dict[str, Any] = {}
        if request.path.endswith("/file_stream"):
            server.store(server.run(request.path.split("/")[-2]), json.loads(body))
        elif request.path.endswith("/graphql"):
            asked = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            name = operation[1] if operation else ""
            content = {"data": _answer(server, name, asked.get("variables") or {})}
        return Response(json.dumps(content), content_type="application/json")  # also of what wandb counts of itself

    with answering(answer) as server.url:
        yield server
