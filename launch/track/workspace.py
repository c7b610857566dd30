"""`shardwise workspace`: saves the view "shardwise: memory and throughput" in a wandb project.

To change the view, edit `SECTIONS`; `--json` prints it. A saved view is one JSON text in the format of the package
wandb-workspaces. That package is not used: its public `save` makes another view each time, while this command replaces
the view of the same name. Only the settings that differ from those of an empty workspace are here.
"""

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwise.launch.options import WorkspaceOptions
from shardwise.launch.terminal import Console
from shardwise.launch.track.start import login_problem, run_wandb_command
from shardwise.launch.track.tracker import PREDICTED, STEP, ViewRequest, series_name
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.job.sections import LogJob

NAME = "shardwise: memory and throughput"
IDENTITY = "shardwisememory"  # of the view in every project
_TIMEOUT_S = 120.0
_COLUMNS = 2
_WIDTH, _HEIGHT = 12, 8  # of a chart, in wandb's grid


class Chart(NamedTuple):
    """One line chart over the step, of fields of metrics.jsonl."""

    title: str
    fields: tuple[str, ...]
    predicted: tuple[str, ...] = ()  # fields whose prediction is shown as well


class Section(NamedTuple):
    """Charts under one heading."""

    name: str
    charts: tuple[Chart, ...]


SECTIONS = (
    Section(
        "memory",
        (
            Chart("peak memory of a step, bytes", ("memory_peak_bytes",), ("memory_peak_bytes",)),
            Chart("memory between steps, bytes", ("memory_allocated_bytes",), ("memory_allocated_bytes",)),
            Chart("memory that torch reserves, bytes", ("memory_reserved_bytes",), ("memory_reserved_bytes",)),
            Chart("memory of the whole card, bytes", ("memory_device_bytes",), ("memory_device_bytes",)),
            Chart(
                "peak by phase, bytes",
                ("memory_peak_forward_bytes", "memory_peak_backward_bytes", "memory_peak_optimizer_bytes"),
            ),
            Chart("host memory, bytes", ("host_rss_bytes", "host_pinned_bytes"), predicted=("host_rss_bytes",)),
        ),
    ),
    Section(
        "throughput",
        (
            Chart("tokens a second", ("tokens_per_s",), ("tokens_per_s",)),
            Chart("tokens a second and device", ("tokens_per_s_per_gpu",), ("tokens_per_s_per_gpu",)),
            Chart("model FLOPs utilisation", ("mfu",), ("mfu",)),
            Chart("seconds of a step", ("step_s",), ("step_s",)),
            Chart(
                "where a step's seconds go",
                ("data_s", "forward_s", "backward_s", "optimizer_s", "wait_s", "checkpoint_s"),
            ),
            Chart("utilisation of rank 0's GPU", ("gpu_utilization",)),
        ),
    ),
    Section(
        "training",
        (
            Chart("loss", ("loss", "eval_loss")),
            Chart("learning rate", ("lr",)),
            Chart("norm of the gradient", ("grad_norm",)),
            Chart("attempt", ("attempt",)),
        ),
    ),
)


def series_of(chart: Chart) -> list[str]:
    """The series of a chart, predicted ones last."""
    return [*map(series_name, chart.fields), *(f"{series_name(field)}{PREDICTED}" for field in chart.predicted)]


def run_workspace(
    options: WorkspaceOptions, console: Console, *, environment: Mapping[str, str] = os.environ
) -> ExitCode:
    """Saves the view and prints its URL; EnvironmentFaultError if wandb does not accept it."""
    if options.as_json:
        console.line(json.dumps(workspace(), indent=1))
        return ExitCode.DONE
    problem = login_problem(environment)
    if problem is not None:
        raise EnvironmentFaultError(f"shardwise workspace: {problem}")
    request = ViewRequest(
        entity=options.entity or environment.get("WANDB_ENTITY"),
        project=options.project or LogJob().project,
        identity=IDENTITY,
        title=NAME,
        view=workspace(),
    )
    result = run_wandb_command("save-view", request, environment, timeout_s=_TIMEOUT_S)
    if result.url is None:
        raise EnvironmentFaultError(
            f"shardwise workspace: {result.problem};\n"
            "a project exists once a run was sent to it; name another with --project and --entity"
        )
    console.line(f"saved as {NAME!r}: {result.url}")
    return ExitCode.DONE


def workspace() -> dict[str, Any]:
    """The saved view, in wandb's format."""
    return {
        "section": {
            "name": "",
            "openViz": True,
            "openRunSet": 0,
            "runSets": [_run_set()],
            "customRunColors": {},
            "settings": {"xAxis": STEP, "xAxisActive": True, "smoothingType": "none", "shouldAutoGeneratePanels": True},
            "panelBankConfig": {
                "state": 0,
                "settings": {"autoOrganizePrefix": 1, "showEmptySections": False, "sortAlphabetically": False},
                "sections": [
                    *(
                        _section(each.name, [_panel(each, chart, place) for place, chart in enumerate(each.charts)])
                        for each in SECTIONS
                    ),
                    _section("Hidden Panels", [], is_open=False),
                ],
            },
            "panelBankSectionConfig": {
                "name": "Report Panels",
                "isOpen": False,
                "type": "grid",
                "panels": [],
                "sorted": 0,
                "flowConfig": _flow(),
                "localPanelSettings": _panel_settings(),
            },
        },
        "vizExpanded": False,
        "libraryExpanded": True,
    }


def _run_set() -> dict[str, Any]:
    columns = [
        "run:displayName",
        "summary:report/ending",
        "config:plan.value.strategy",
        "config:plan.value.method",
        "summary:report/memory_peak_bytes",
        "summary:report/memory_peak_bytes_predicted",
        "summary:report/tokens_per_s_per_gpu",
        "summary:report/tokens_per_s_per_gpu_predicted",
        "summary:report/eval_loss",
    ]
    shown = dict.fromkeys(columns, True)
    return {
        "id": IDENTITY,
        "name": "Run set",
        "enabled": True,
        "runFeed": {
            "version": 2,
            "columnVisible": shown,
            "columnPinned": shown,
            "columnWidths": {},
            "columnOrder": columns,
            "pageSize": 20,
            "onlyShowSelected": False,
        },
        "search": {"query": ""},
        "filters": {"op": "OR", "filters": [{"op": "AND", "filters": []}]},
        "grouping": [],
        "sort": {"keys": [{"key": {"section": "run", "name": "createdAt"}, "ascending": False}]},
        "selections": {"root": 1, "bounds": [], "tree": []},
        "expandedRowAddresses": [],
    }


def _section(name: str, panels: list[dict[str, Any]], *, is_open: bool = True) -> dict[str, Any]:
    return {
        "name": name,
        "isOpen": is_open,
        "type": "flow",
        "flowConfig": _flow(),
        "sorted": 0,
        "localPanelSettings": _panel_settings(),
        "panels": panels,
    }


def _panel(section: Section, chart: Chart, number: int) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "__id__": f"{section.name}{number}",
        "viewType": "Run History Line Plot",
        "config": {"chartTitle": chart.title, "metrics": series_of(chart), "xAxis": STEP, "smoothingType": "none"},
        "layout": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
    }


def _flow() -> dict[str, Any]:
    return {
        "snapToColumns": True,
        "columnsPerPage": _COLUMNS,
        "rowsPerPage": 3,
        "gutterWidth": 16,
        "boxWidth": 460,
        "boxHeight": 300,
    }


def _panel_settings() -> dict[str, Any]:
    return {"xAxis": STEP, "xAxisActive": True, "smoothingType": "none", "smoothingWeight": 0, "smoothingActive": False}
