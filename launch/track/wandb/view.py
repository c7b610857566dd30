"""`python -m launch.track.wandb.view`: saves a view of a wandb project; JSON on standard input and output.

A process of its own, as wandb takes a second to load. The request names entity (null: the login's own), project, the
view's name and title and its text; the answer is where the view is seen, or what went wrong: one JSON object each.
"""

import json
import sys
from typing import Any

from launch.track.wandb.library import Server
from trainer.spec.secrets import redact, redacted_output

_ENTITY = "query OwnEntity { viewer { entity } }"
_FIND = """
query FindView($entityName: String, $name: String, $viewType: String, $viewName: String) {
  project(name: $name, entityName: $entityName) {
    allViews(viewType: $viewType, viewName: $viewName) { edges { node { id } } }
  }
}
"""
_SAVE = """
mutation UpsertView(
  $id: ID, $entityName: String, $projectName: String, $type: String, $name: String, $displayName: String, $spec: String
) {
  upsertView(input: {
    id: $id, entityName: $entityName, projectName: $projectName, type: $type, name: $name, displayName: $displayName,
    spec: $spec, createdUsing: WANDB_SDK
  }) { view { id name } inserted }
}
"""
_TYPE = "project-view"


def save_view(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    """Changes the view of this name, or makes it."""
    entity, project = request["entity"] or _own_entity(server), request["project"]
    found = server.ask(
        _FIND, {"entityName": entity, "name": project, "viewType": _TYPE, "viewName": request["view_name"]}
    )
    if found.get("project") is None:
        return {"problem": f"there is no project {entity}/{project} that this login may see"}
    edges = (found["project"].get("allViews") or {}).get("edges") or []
    variables = {
        "entityName": entity,
        "projectName": project,
        "type": _TYPE,
        "name": request["view_name"],
        "displayName": request["title"],
        "spec": json.dumps(request["view"]),
    }
    saved = server.ask(_SAVE, variables | ({"id": edges[0]["node"]["id"]} if edges else {}))
    if (saved.get("upsertView") or {}).get("view") is None:
        return {"problem": f"{entity}/{project}: the view was not saved; may this login write there?"}
    return {"url": f"{server.app_url}/{entity}/{project}?nw={request['identity']}"}


def _own_entity(server: Server) -> str | None:
    """Where the login's runs go that name no entity."""
    return (server.ask(_ENTITY, {}).get("viewer") or {}).get("entity")


def main() -> int:
    with redacted_output():
        request = json.load(sys.stdin)
        try:
            answer = save_view(Server(), request)
        except Exception as error:  # noqa: BLE001 - wandb raises what it likes; one line of it is shown
            lines = str(error).splitlines() or [""]
            answer = {"problem": redact(f"{type(error).__name__}: {lines[0]}")}
        sys.stdout.write(json.dumps(answer) + "\n")
        return 0


if __name__ == "__main__":
    sys.exit(main())
