"""The pages as HTML: the list of runs, one run, several side by side, with the charts and tables of `report --html`.

A page has a fixed head and parts, which `ui.js` replaces where they changed. Everything that a file or a request may
have named is escaped here or by `block_html`.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from html import escape
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace

from shardwise.launch.commands.ui.runs import MOST_RUNS, Runs, Summary, WholeRun
from shardwise.launch.rundir.files import last_lines, tail_lines
from shardwise.launch.rundir.paths import CONSOLE_LOG
from shardwise.launch.rundir.state import RunState
from shardwise.launch.show.recorded_run import RecordedRun
from shardwise.launch.show.report import PROCESS_RAM
from shardwise.launch.show.run_page import (
    STEP_LABEL,
    XAxis,
    comparison_page,
    on_axis,
    run_page,
    run_text,
    setting_text,
    settings_table,
)
from shardwise.launch.show.view import LiveView, MemoryGauge
from shardwise.trainer.planning.page.content import Block, LineChart, Points, Quote, Section, Sentence, Series, Unit
from shardwise.trainer.planning.page.html import axes_of, block_html, line_chart_html, line_path, scrolling
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.secrets import printable
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds

ACT = "/act"  # the address of actions
LIVE_S, IDLE_S, LIST_S = 1.5, 6.0, 3.0  # between two looks of a page
MOST_COMPARED, MOST_COLUMNS = 12, 8
_USUAL_SETTINGS = ("model.name", "train.method", "train.lr", "train.seq_len", "train.tokens_per_step", "train.seed")
SMOOTHINGS = ("0", "0.6", "0.9", "0.97", "0.99")
SCALES = ("linear", "log")
_FOLDED = ("plan", "runners-up", "rejected", "notes", "verified", "hardware", "versions")
_CHARTS = ("loss", "throughput", "gradients", "lr", "memory", "step", "device")
_LOG_CHARTS = ("loss", "gradients", "lr")
_NUM_LOG_LINES, _MOST_SETTINGS_BYTES = 200, 1 << 16
_TONES = {
    RunState.RUNNING: "live",
    RunState.FINISHED: "good",
    RunState.STOPPED: "warn",
    RunState.PREEMPTED: "warn",
    RunState.OUT_OF_MEMORY: "bad",
    RunState.FAILED: "bad",
    RunState.LOST: "bad",
}
_FULL_SHARE = 0.95

Query = Mapping[str, list[str]]


class Content(NamedTuple):
    """A page: what is fixed, and its parts by name, all of them HTML."""

    title: str
    head: str
    parts: dict[str, str]
    place: str = ""  # of the navigation
    api: str = ""  # where `ui.js` gets the parts again
    every_s: float = 0.0  # 0: when a form changed only


def document(content: Content) -> str:
    """The whole page."""
    here = "/plan" if content.place == "/plan" else "/"
    links = "".join(
        f'<a href="{address}"{" aria-current=page" if address == here else ""}>{name}</a>'
        for address, name in (("/", "Runs"), ("/plan", "Plan"))
    )
    parts = "".join(f'<div class="pane {name}" data-part="{name}">{html}</div>' for name, html in content.parts.items())
    api = f' data-api="{escape(content.api)}" data-every="{content.every_s:g}"' if content.api else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(content.title)}</title>\n"
        '<link rel="icon" href="/icon.svg"><link rel="stylesheet" href="/ui.css">\n'
        '<script src="/ui.js" defer></script>\n</head>\n<body>\n'
        '<a class="skip" href="#main">Skip to content</a>\n'
        f'<header class="top"><nav><a class="brand" href="/"><img src="/icon.svg" alt="" width="22" height="22">'
        f"shardwise</a>{links}</nav></header>\n"
        f'<main id="main" class="page {content.place.strip("/") or "runs"}"{api}>\n{content.head}\n{parts}\n</main>\n'
        "</body>\n</html>\n"
    )


def forwarding(address: str) -> str:
    """A page that goes on to another one by itself."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>shardwise</title>'
        f'<meta http-equiv="refresh" content="0;url={escape(address)}"><link rel="icon" href="/icon.svg"></head>'
        f'<body><p><a href="{escape(address)}">shardwise</a></p></body></html>\n'
    )


def problem(title: str, reason: str) -> Content:
    """A page that states why there is no other."""
    return Content(title, f"<h1>{escape(title)}</h1>", {"problem": f'<p class="card">{lines(reason)}</p>'})


def outcome(text: str, name: str) -> Content:
    """What an action did, with the way back to its run."""
    back = f'<p><a href="{escape(_address("/run", name=name))}">Back to {escape(name)}</a></p>' if name else ""
    return Content("Done", "<h1>Done</h1>", {"outcome": f'<div class="card"><p>{lines(text)}</p>{back}</div>'})


def lines(text: str) -> str:
    """Escaped text with its line breaks."""
    return "<br>".join(escape(line) for line in text.splitlines())


def runs_content(runs: Runs, query: Query) -> Content:
    """The list of runs, the newest first, with the settings of the query as columns."""
    found, total = runs.summaries()
    shown = f"the newest {MOST_RUNS} of {total} runs" if total > len(found) else f"{total} run{'s' * (total != 1)}"
    head = f'<div class="title"><h1>Runs</h1><p class="sub"><code>{escape(str(runs.folder))}</code></p></div>'
    started = "".join(_started(each.command, each.state) for each in runs.started)
    if not found:
        return Content("runs", head, {"started": started, "table": _no_runs(runs)}, "/", "/api/", LIST_S)
    head += (
        '<form id="compare" class="tools" action="/compare"><label>Filter <input type="search" id="filter" '
        'autocomplete="off" placeholder="name, state, model"></label>'
        '<button id="compare-button">Compare selected</button></form>'
    )
    offered = _offered(found)
    columns = [name for name in dict.fromkeys(query.get("column", ())) if name in offered][:MOST_COLUMNS]
    if offered:
        head += _picker(offered, columns)
    rows = "".join(_row(run, columns) for run in found)
    header = "".join(_title(name, number) for number, name in enumerate((*_COLUMNS, *columns)))
    table = f'<table class="runs"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>'
    parts = {"started": started, "table": f'{scrolling("runs", "card")}{table}</div><p class="sub">{shown}</p>'}
    return Content("runs", head, parts, "/", "/api/", LIST_S)


_COLUMNS = ("", "run", "state", "progress", "loss", "", "tokens/s", "time", "model", "started")  # of the list of runs


def _started(command: str, state: str) -> str:
    """A training that a page started, with the end of its output if it failed."""
    tone = "warn" if state.startswith("ended") else "calm"
    return f'<p class="alert {tone}"><code>{escape(command)}</code>: {lines(state)}</p>'


def _offered(found: Iterable[Summary]) -> list[str]:
    """Settings that are not the same in all runs, and those that are looked at most."""
    jobs = [run.settings for run in found if run.settings]
    first = jobs[0] if jobs else {}
    differing = {name for job in jobs for name, value in job.items() if value != first.get(name)}
    return [name for name in dict.fromkeys(chain(*jobs)) if name in differing or name in _USUAL_SETTINGS]


def _picker(offered: Iterable[str], columns: Sequence[str]) -> str:
    """The settings that can be columns."""
    boxes = "".join(
        f'<label class="box"><input type="checkbox" name="column" value="{escape(name)}"'
        f"{' checked' if name in columns else ''}> {escape(name)}</label>"
        for name in offered
    )
    return (
        f'<form class="picker" data-live action="/"><details{" open" if columns else ""}><summary>Settings as columns'
        f'</summary><div class="boxes">{boxes}</div><button class="plain">Show</button></details></form>'
    )


def _setting_cell(run: Summary, name: str) -> str:
    value = run.settings.get(name)
    by = _by(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""
    return f'<td class="setting" data-name="{escape(name)}"{by}>{escape(setting_text(value))}</td>'


def _title(name: str, column: int) -> str:
    """The title of a column: a button that sorts the rows by it; ui.js reads the number of the column."""
    if not name:
        return "<td></td>"
    right = " class=right" if name in ("loss", "tokens/s") else ""
    button = f'<button type="button" data-id="sort-{column}" data-sort="{column}">{escape(name)}</button>'
    return f'<th{right} aria-sort="none">{button}</th>'


def _no_runs(runs: Runs) -> str:
    return (
        f'<div class="card empty"><p>There is no run in <code>{escape(str(runs.folder))}</code> yet.</p>'
        "<p>Start one, and it appears here by itself:</p><pre>shardwise init --model Qwen/Qwen2.5-0.5B-Instruct "
        "--data chats.jsonl\nshardwise train job.yaml</pre>"
        '<p>Or see first <a href="/plan">what fits, and how long it runs</a>.</p></div>'
    )


def _row(run: Summary, columns: Sequence[str]) -> str:
    """A row of the list."""
    name, status = escape(run.name), run.status
    box = f'<input type="checkbox" form="compare" name="run" value="{name}" aria-label="compare {name}">'
    link = f'<a href="{escape(_address("/run", name=run.name))}">{name}</a>'
    started = time.strftime("%d %b %Y, %H:%M", time.localtime(run.started_s))
    if status is None:
        reason = f"{badge('unreadable', 'bad')} {escape(run.problem or '')}"
        begin = f"<td{_by(run.started_s)}>{started}</td>" + "<td></td>" * len(columns)
        return f'<tr><td>{box}</td><td>{link}</td><td colspan="7">{reason}</td>{begin}</tr>'
    share = (status.step or 0) / status.num_steps if status.num_steps else 0.0
    steps = (
        "-" if status.step is None else f"{status.step:,}" + (f" of {status.num_steps:,}" if status.num_steps else "")
    )
    left = "" if status.seconds_left is None else f"{format_seconds(status.seconds_left)} left"
    spent = "" if run.duration_s is None or run.is_live else format_seconds(run.duration_s)
    loss = run.loss if status.loss is None else status.loss
    rate = run.tokens_per_s or status.tokens_per_s
    cells = (
        f"<td>{box}</td><td class=name>{link}</td><td>{state_badge(status.state, status.reason)}</td>",
        f"<td{_by(share)}>{bar(share)}<small>{steps}</small></td>",
        f"<td class=right{_by(loss)}>{'-' if loss is None else f'{loss:.4f}'}</td><td>{_spark(run.curve)}</td>",
        f"<td class=right{_by(rate)}>{'-' if not rate else format_count(rate)}</td>",
        f"<td class=time{_by(status.seconds_left if left else run.duration_s)}>{left or spent or '-'}</td>",
        f"<td>{'-' if run.plan is None else escape(_model_text(run.plan))}</td>",
        f"<td{_by(run.started_s)}><small>{started}</small></td>",
        *(_setting_cell(run, name) for name in columns),
    )
    return f"<tr>{''.join(cells)}</tr>"


def _by(value: float | None) -> str:
    """The number that a cell is sorted by; text is sorted as it stands."""
    return f' data-by="{"" if value is None else f"{value:.9g}"}"'


def _model_text(plan: Plan) -> str:
    model = plan.job.model.name or plan.job.model.config or plan.model_shape.model_type
    return f"{model.rstrip('/').rpartition('/')[2]}, {plan.chosen.method}"


def state_badge(state: RunState, reason: str = "") -> str:
    """The state of a run in its colour, with its reason as a tooltip."""
    return badge(state.value.replace("_", " "), _TONES.get(state, "calm"), reason)


def badge(text: str, tone: str, reason: str = "") -> str:
    """A word in a colour; the word alone has the meaning."""
    title = f' title="{escape(reason)}"' if reason else ""
    return f'<span class="badge {tone}"{title}>{escape(text)}</span>'


def bar(share: float, *, mark: float | None = None, is_full: bool = False) -> str:
    """A share as a bar, with a mark at the prediction."""
    width = 100 * min(1.0, max(0.0, share))
    line = "" if mark is None else f'<rect class="at" x="{100 * min(1.0, max(0.0, mark)):.2f}%" width="2" height="8"/>'
    tone = "full" if is_full else "filled"
    return (
        f'<svg class="bar" height="8" aria-hidden="true"><rect class="rest" width="100%" height="8" rx="4"/>'
        f'<rect class="{tone}" width="{width:.2f}%" height="8" rx="4"/>{line}</svg>'
    )


@lru_cache(maxsize=MOST_RUNS)
def _spark(points: Points) -> str:
    """A small curve of the loss."""
    chart = LineChart(
        caption="", x_label="", unit=Unit.NUMBER, series=(Series(name="", points=points),), from_zero=False
    )
    axes = axes_of(chart)
    if axes is None or len(points) < 2:
        return ""
    return (
        '<svg class="spark" viewBox="0 0 1000 180" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="line c0" d="{line_path(points, axes)}"/></svg>'
    )


def run_content(runs: Runs, query: Query) -> Content:
    """One run, live or ended."""
    name = _only(query, "name")
    smoothing = float(_choice(query, "smooth", SMOOTHINGS))
    axis, scale = XAxis(_choice(query, "x", tuple(XAxis))), _choice(query, "scale", SCALES)
    whole = runs.whole(name)
    sections = {section.name: section for section in run_page(whole.run, smoothing=smoothing).sections}
    charts = {key: _over_steps(sections[key]) for key in _CHARTS if key in sections}
    others = [sections[key] for key in sections if key not in (*_FOLDED, *_CHARTS, "end", "incidents")]
    others += [rest for key in charts if (rest := _without_steps(sections[key])) is not None]
    folded = [section for key, section in sections.items() if key in _FOLDED]
    for key, section in charts.items():
        is_log = scale == "log" and key in _LOG_CHARTS
        blocks = (_plotted(block, whole.run, axis, is_log=is_log) for block in section.blocks)
        charts[key] = replace(section, blocks=tuple(blocks))
    parts = {
        "live": _tiles(whole),
        "actions": _stop_form(runs.nonce, name) if whole.is_live else _ask_form(runs.nonce, name, whole.run),
        "incidents": section_html(sections["incidents"], "card") if "incidents" in sections else "",
        "charts": "".join(section_html(section, "card") for section in charts.values() if section.blocks),
        "figures": "".join(section_html(section, "card") for section in others),
        "more": _settings(whole.run) + _log(whole.run.run_dir) + "".join(map(folded_html, folded)),
    }
    plan = whole.run.plan
    what = "" if plan is None else f'<p class="sub">{escape(run_text(plan))}</p>'
    selects = (
        _select("smooth", "Smooth the loss by", SMOOTHINGS, query),
        _select("x", "Over", tuple(XAxis), query),
        _select("scale", "Scale", SCALES, query),
    )
    head = (
        f'<div class="heading"><div class="title"><h1>{escape(name)}</h1>{what}</div>'
        f'<form class="tools" data-live action="/run"><input type="hidden" name="name" value="{escape(name)}">'
        f"{''.join(selects)}</form></div>"
    )
    return Content(_tab(whole.look.view, name), head, parts, "/run", "/api/run", LIVE_S if whole.is_live else IDLE_S)


def _stop_form(nonce: str | None, name: str) -> str:
    """A button that stops a run after a second click."""
    text = "It saves a checkpoint and ends, as after <code>shardwise cancel</code>; it can be resumed."
    return action_form(nonce, "stop", "Stop this run", text, {"name": name})


def _ask_form(nonce: str | None, name: str, run: RecordedRun) -> str:
    """A question to the exported model of a run that has ended."""
    if not (run.run_dir / "export").is_dir():
        return ""
    text = "The model is loaded for each question, which can take a minute, and has no memory of earlier ones."
    field = '<label>Question <input name="question" required maxlength="1000" size="60" autocomplete="off"></label> '
    return action_form(nonce, "ask", "Ask the model", text, {"name": name}, field)


def action_form(
    nonce: str | None, action: str, title: str, text: str, fields: Mapping[str, str], more: str = ""
) -> str:
    """A folded form with a button; nothing without a nonce, where actions are not allowed. `more` is HTML."""
    if nonce is None:
        return ""
    hidden = "".join(
        f'<input type="hidden" name="{escape(key)}" value="{escape(value)}">'
        for key, value in {"nonce": nonce, "action": action, **fields}.items()
    )
    return (
        f'<details class="card action" data-id="{action}"><summary>{title}</summary><p>{text}</p>'
        f'<form method="post" action="{ACT}">{hidden}{more}<button>{title}</button></form></details>'
    )


def _plotted(block: Block, run: RecordedRun, axis: XAxis, *, is_log: bool) -> Block:
    return on_axis(replace(block, is_log=is_log), run, axis) if isinstance(block, LineChart) else block


def _settings(run: RecordedRun) -> str:
    """The settings of the job, those that are not the defaults first."""
    if run.plan is None:
        return ""
    written = "\n".join(tail_lines(run.run_dir / "job.yaml", _MOST_SETTINGS_BYTES))
    changed = Section(title="settings", name="settings", blocks=(Sentence(text=_CHANGED), settings_table(run.plan.job)))
    every = (Quote(label="all settings, with where each is from: job.yaml", text=written),) if written else ()
    return folded_html(replace(changed, blocks=(*changed.blocks, *every)))


_CHANGED = "that differ from the defaults:"


def _log(run_dir: Path) -> str:
    """The last lines that the run printed."""
    found = last_lines(run_dir / CONSOLE_LOG, _NUM_LOG_LINES)
    if not found:
        return ""
    title = f"log, last {len(found)} lines"
    return folded_html(Section(title=title, name="log", blocks=(Quote(label=CONSOLE_LOG, text="\n".join(found)),)))


def _over_steps(section: Section) -> Section:
    """The section with its charts over the steps of the run, and its sentences if it has no other chart."""
    rest = _without_steps(section)
    return section if rest is None else replace(section, blocks=tuple(filter(_has_step_axis, section.blocks)))


def _without_steps(section: Section) -> Section | None:
    """The blocks of a section other than charts over steps, if one is a chart over the time of a step."""
    blocks = tuple(block for block in section.blocks if not _has_step_axis(block))
    return replace(section, blocks=blocks) if any(isinstance(block, LineChart) for block in blocks) else None


def _has_step_axis(block: Block) -> bool:
    return isinstance(block, LineChart) and block.x_label == STEP_LABEL


def _tab(view: LiveView, name: str) -> str:
    """`62% name`, the title of the window."""
    return f"{int(100 * (view.step or 0) / view.num_steps)}% {name}" if view.num_steps else name


def _tiles(whole: WholeRun) -> str:
    """The state of a run in a row of figures."""
    view, judged, run = whole.look.view, whole.look.judged, whole.run
    report = run.report
    share = (view.step or 0) / view.num_steps if view.num_steps else 0.0
    of = f" of {view.num_steps:,}" if view.num_steps else ""
    left = None if view.seconds_left is None else f"{format_seconds(view.seconds_left)} left"
    spent = None if report is None or whole.is_live else f"{format_seconds(report.duration_s)} in all"
    if spent and report is not None and report.predicted_s is not None:
        spent += f", predicted {format_seconds(report.predicted_s)}"
    ended = state_badge(judged.state) + (f" attempt {view.attempt}" if view.attempt > 1 else "")
    tiles = [tile("state", ended, bar(share), f"step {view.step or 0:,}{of}", left or spent or view.state)]
    loss = view.loss if view.loss is not None else run.final_loss
    if loss is not None:
        notes = (
            f"held-out {view.eval_loss:.4f}" if view.eval_loss is not None else "",
            f"learning rate {view.lr:.3g}" if view.lr is not None else "",
        )
        tiles.append(tile("loss", f"{loss:.4f}", *map(escape, notes)))
    rate, expected = view.tokens_per_s, view.predicted_tokens_per_s
    if rate:
        compared = f"{rate / expected:.0%} of the predicted {format_count(expected)}" if expected else ""
        mfu = f"MFU {view.mfu:.1%}" if view.mfu is not None else ""
        tiles.append(
            tile("tokens/s", format_count(rate), bar(rate / expected) if expected else "", view.rate_of, compared, mfu)
        )
    if view.memory is not None and (view.memory.used_bytes or view.memory.peak_bytes):
        tiles.append(_memory_tile(view.memory))
    card = view.card
    figures = (
        (card.utilization, "{:.0%} busy"), (card.power_w, "{:.0f} W"), (card.temperature_c, "{} °C"),
        (card.throttle, "slowed by {}"),
    )  # fmt: skip
    if any(figure is not None for figure, _ in figures):
        first, *others = (escape(form.format(figure)) for figure, form in figures if figure is not None)
        tiles.append(tile("GPU of rank 0", first, *others))
    error = None if report is None or whole.is_live else report.error
    alert = f'<p class="alert">{lines(error)}</p>' if error else ""
    return f'{alert}<div class="tiles">{"".join(tiles)}</div>'


def _memory_tile(gauge: MemoryGauge) -> str:
    """Memory in use against the card or the RAM, with a mark at the prediction."""
    used, total = gauge.used_bytes or gauge.peak_bytes or 0, gauge.total_bytes
    share = used / total if total else 0.0
    mark = gauge.predicted_bytes / total if gauge.predicted_bytes and total else None
    of = f"of {format_bytes(total)} {gauge.place}" if total else ""
    peak = f"{gauge.peak_name} {format_bytes(gauge.peak_bytes)}" if gauge.peak_bytes else ""
    expected = f"predicted {format_bytes(gauge.predicted_peak_bytes)}" if gauge.predicted_peak_bytes else ""
    note = ", ".join(filter(None, (peak, expected)))
    meter = bar(share, mark=mark, is_full=share >= _FULL_SHARE) if total else ""
    return tile("memory" if gauge.place == "card" else PROCESS_RAM, format_bytes(used), meter, of, note)


def tile(label: str, figure: str, *notes: str) -> str:
    """A figure with its label; all of it HTML."""
    below = "".join(note if note.startswith("<svg") else f"<p>{note}</p>" for note in notes if note)
    return f'<div class="tile"><h2>{label}</h2><p class="figure">{figure}</p>{below}</div>'


def comparison_content(runs: Runs, query: Query) -> Content:
    """Several runs side by side."""
    names = list(dict.fromkeys(query.get("run", [])))
    if not 2 <= len(names) <= MOST_COMPARED:
        reason = f"select 2 to {MOST_COMPARED} runs in the list, and then Compare selected"
        return problem("Nothing to compare" if len(names) < 2 else "Too many runs", reason)._replace(place="/compare")
    wholes = [runs.whole(name) for name in names]
    axis = XAxis(_choice(query, "x", tuple(XAxis)))
    page = comparison_page([whole.run for whole in wholes], axis=axis)
    parts = {"figures": "", "charts": ""}
    for section in page.sections:
        parts["charts" if _has_chart(section) else "figures"] += section_html(section, "card")
    every_s = LIVE_S if any(whole.is_live for whole in wholes) else IDLE_S
    links = ", ".join(f'<a href="{escape(_address("/run", name=name))}">{escape(name)}</a>' for name in names)
    hidden = "".join(f'<input type="hidden" name="run" value="{escape(name)}">' for name in names)
    head = (
        f'<div class="heading"><div class="title"><h1>{escape(page.title)}</h1><p class="sub">{links}</p></div>'
        f'<form class="tools" data-live action="/compare">{hidden}'
        f"{_select('x', 'Over', tuple(XAxis), query)}</form></div>"
    )
    return Content(page.title, head, parts, "/compare", "/api/compare", every_s)


def _has_chart(section: Section) -> bool:
    return any(isinstance(block, LineChart) for block in section.blocks)


def section_html(section: Section, names: str = "") -> str:
    """A section whose line charts can be read with the pointer and the keyboard."""
    return f'<section class="{names}"><h2>{escape(section.title)}</h2>{_blocks(section.blocks)}</section>'


def folded_html(section: Section) -> str:
    """A section of which the title is shown until it is opened."""
    head = f'<details class="card" data-id="{escape(section.name)}"><summary>{escape(section.title)}</summary>'
    return f"{head}{_blocks(section.blocks)}</details>"


def _blocks(blocks: Iterable[Block]) -> str:
    return "\n".join(_plot(block) if isinstance(block, LineChart) else "\n".join(block_html(block)) for block in blocks)


def _plot(chart: LineChart) -> str:
    """A chart with its figures as text, for `ui.js`."""
    axes = axes_of(chart)
    if axes is None:
        return ""
    series = [
        {
            "name": printable(each.name),
            "level": each.is_dashed,
            "points": [(x, None if y is None else chart.unit.text(y)) for x, y in each.points],
        }
        for each in chart.series
    ]
    suffix = " s" if chart.x_unit is Unit.SECONDS else ""
    figures = {"left": axes.left, "right": axes.right, "label": chart.x_label, "suffix": suffix, "series": series}
    return (
        f'<figure class="plot" tabindex="0" data-id="{escape(chart.caption)}" '
        f'aria-label="{escape(chart.caption)}; arrow keys read its figures" '
        f'data-chart="{escape(msgspec.json.encode(figures).decode())}">{"".join(line_chart_html(chart))}</figure>'
    )


def _choice(query: Query, name: str, choices: Sequence[str]) -> str:
    """The choice of a query, the first one if it has none of them."""
    text = query.get(name, [""])[0]
    return text if text in choices else str(choices[0])


def _select(name: str, label: str, choices: Sequence[str], query: Query) -> str:
    chosen = _choice(query, name, choices)
    options = "".join(f"<option{' selected' if each == chosen else ''}>{each}</option>" for each in choices)
    return f'<label>{label} <select name="{name}">{options}</select></label>'


def _only(query: Query, name: str) -> str:
    values = query.get(name, [])
    if len(values) != 1:
        raise InputError(f"the address has no {name}")
    return values[0]


def _address(path: str, **query: str | Sequence[str]) -> str:
    return f"{path}?{urlencode(query, doseq=True, errors='surrogateescape')}"
