"""The workspace: a definition whose every series exists, and a command that saves it once in a project."""

import json

import pytest
from msgspec.structs import replace
from run_factory import run_plan
from tracker_factory import tracker_environment
from wandb_server import ENTITY, wandb_server

from shardwise.launch.options import WorkspaceOptions
from shardwise.launch.terminal import Console
from shardwise.launch.track.tracker import STEP, predicted_series, series_name
from shardwise.launch.track.workspace import IDENTITY, NAME, SECTIONS, run_workspace, series_of, workspace
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind

KEY = "canary" + "0123456789" * 4


def test_every_series_of_a_chart_is_one_that_is_sent():
    from shardwise.trainer.runtime.loop.metrics import StepMetrics  # loads torch

    chosen = run_plan().chosen
    chosen = replace(chosen, speed=replace(chosen.speed, mfu=0.5))
    sent = {series_name(field) for field in StepMetrics.__struct_fields__}
    sent |= {name for kind in DeviceKind for name in predicted_series(chosen, kind)}
    charts = [chart for section in SECTIONS for chart in section.charts]
    assert charts and {series for chart in charts for series in series_of(chart)} - sent == set()
    for section in SECTIONS[:2]:
        assert sum(bool(chart.predicted) for chart in section.charts) >= 4, section.name
    for section in workspace()["section"]["panelBankConfig"]["sections"]:
        places = [(panel["layout"]["x"], panel["layout"]["y"]) for panel in section["panels"]]
        assert len(set(places)) == len(places)
        assert all(panel["config"]["xAxis"] == STEP for panel in section["panels"])


def test_it_is_saved_once_and_changed_the_next_time_in_a_project_that_exists(capsys, tmp_path):
    run_workspace(WorkspaceOptions(as_json=True), Console(), environment={})
    assert json.loads(capsys.readouterr().out) == workspace()
    with wandb_server() as server:
        server.projects.add("mine")
        environment = tracker_environment(tmp_path, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
        for _ in range(2):
            run_workspace(WorkspaceOptions(project="mine"), Console(), environment=environment)
        with pytest.raises(EnvironmentFaultError, match=r"team/other(?s:.*)--project"):
            run_workspace(WorkspaceOptions(project="other", entity="team"), Console(), environment=environment)
    with pytest.raises(EnvironmentFaultError, match="wandb login"):
        run_workspace(WorkspaceOptions(), Console(), environment=tracker_environment(tmp_path))
    first, second = server.views
    assert (first["entityName"], first["projectName"], first["name"]) == (ENTITY, "mine", f"nw-{IDENTITY}-v")
    assert first["displayName"] == NAME and json.loads(first["spec"]) == workspace()
    assert "id" not in first and second["id"] == "view-1"
    assert f"{server.url}/{ENTITY}/mine?nw=" in capsys.readouterr().out
