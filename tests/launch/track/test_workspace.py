"""The workspace: every series of its charts exists, and a command saves it in a project."""

import json

import pytest
from msgspec.structs import replace
from run_factory import run_plan
from tracker_factory import tracker_environment
from wandb_server import ENTITY, wandb_server

from shardwise.launch.options import WorkspaceOptions
from shardwise.launch.terminal import Console
from shardwise.launch.track import workspace
from shardwise.launch.track.tracker import predicted_series, series_name
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind

KEY = "canary" + "0123456789" * 4


def test_every_series_of_a_chart_is_one_that_is_sent():
    from shardwise.trainer.runtime.loop.metrics import StepMetrics  # loads torch

    chosen = run_plan().chosen
    chosen = replace(chosen, speed=replace(chosen.speed, mfu=0.5))
    sent = {series_name(field) for field in StepMetrics.__struct_fields__}
    predicted = {name for kind in DeviceKind for name in predicted_series(chosen, kind)}
    charts = [fields for each in workspace.SECTIONS.values() for fields in each.values()]
    drawn = {series for fields in charts for series in workspace.series_of(fields)}
    assert drawn - sent - predicted == set() and len(drawn & predicted) >= 8


def test_it_is_saved_in_a_project_by_who_is_logged_in_and_a_missing_package_is_named(capsys, tmp_path, monkeypatch):
    pytest.importorskip("wandb_workspaces")
    with pytest.raises(EnvironmentFaultError, match="wandb login"):
        workspace.run_workspace(WorkspaceOptions(), Console(), environment=tracker_environment(tmp_path))
    with wandb_server() as server:
        environment = tracker_environment(tmp_path, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
        workspace.run_workspace(WorkspaceOptions(project="mine"), Console(), environment=environment)
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == (ENTITY, "mine", workspace.NAME)
    sections = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    assert [each["name"] for each in sections] == list(workspace.SECTIONS)
    panel = sections[1]["panels"][0]["config"]
    assert panel["metrics"] == list(workspace.series_of(("tokens_per_s",))) and panel["xAxis"] == "step"
    assert f"{server.url}/{ENTITY}/mine?nw=" in capsys.readouterr().out
    monkeypatch.setattr(workspace, "installed_version", lambda _name: None)
    with pytest.raises(EnvironmentFaultError, match=r"wandb-workspaces: .*pip install .*\[workspace\]"):
        workspace.run_workspace(WorkspaceOptions(), Console(), environment={})
