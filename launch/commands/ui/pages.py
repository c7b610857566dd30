"""The pages: the list of runs, one run, several side by side, a conversation; with the charts of `report --html`.

A page has a fixed head and parts, which `ui.js` replaces where they changed: the blocks of a template of `templates/`,
which escapes every value. Charts and tables are escaped by `block_html`.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from markupsafe import Markup
from msgspec.structs import replace

from shardwise.launch.commands.ui.chats import LONGEST_QUESTION, MOST_TURNS
from shardwise.launch.commands.ui.render import Content, Tile, content_of, message
from shardwise.launch.commands.ui.runs import MOST_RUNS, Runs, Summary, WholeRun
from shardwise.launch.rundir.metrics import last_lines, tail_lines
from shardwise.launch.rundir.paths import CONSOLE_LOG
from shardwise.launch.rundir.state import RunState
from shardwise.launch.show.recorded_run import RecordedRun
from shardwise.launch.show.report import PROCESS_RAM
from shardwise.launch.show.run_page import (
    XAxis,
    comparison_page,
    on_axis,
    run_page,
    run_text,
    settings_table,
)
from shardwise.launch.show.view import LiveView, MemoryGauge
from shardwise.trainer.planning.page.content import Block, LineChart, Quote, Section, Sentence, Unit
from shardwise.trainer.planning.page.html import axes_of, block_html, line_chart_html
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.secrets import printable
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds

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


_TITLES = ("", "run", "state", "progress", "loss", "held-out", "tokens/s", "time", "model", "started")


class Row(NamedTuple):
    """A row of the list of runs; `problem` is why there is nothing but a name and a time."""

    name: str
    started_s: float
    started: str
    settings: Mapping[str, Any]
    problem: str | None = None
    state: str = ""
    tone: str = ""
    reason: str = ""
    share: float = 0.0  # of the steps
    steps: str = "-"
    loss: float | None = None
    eval_loss: float | None = None
    rate: float | None = None
    seconds: float | None = None  # that are left, or that the run had
    time: str = ""
    model: str = ""


def runs_content(runs: Runs, query: Query) -> Content:
    """The list of runs, the newest first, with the settings of the query as columns."""
    found, total = runs.summaries()
    offered = _offered(found)
    columns = [name for name in dict.fromkeys(query.get("column", ())) if name in offered][:MOST_COLUMNS]
    return content_of(
        "runs.html",
        "runs",
        place="/",
        api="/api/",
        every_s=LIST_S,
        folder=runs.folder,
        started=runs.started,
        offered=offered,
        columns=columns,
        titles=(*_TITLES, *columns),
        rows=[_row(run) for run in found],
        shown=f"the newest {MOST_RUNS} of {total} runs" if total > len(found) else f"{total} run{'s' * (total != 1)}",
    )


def _offered(found: Iterable[Summary]) -> list[str]:
    """Settings that are not the same in all runs, and those that are looked at most."""
    jobs = [run.settings for run in found if run.settings]
    first = jobs[0] if jobs else {}
    differing = {name for job in jobs for name, value in job.items() if value != first.get(name)}
    return [name for name in dict.fromkeys(chain(*jobs)) if name in differing or name in _USUAL_SETTINGS]


def _row(run: Summary) -> Row:
    started = time.strftime("%d %b %Y, %H:%M", time.localtime(run.started_s))
    row, status = Row(run.name, run.started_s, started, run.settings), run.status
    if status is None:
        return row._replace(problem=run.problem or "")
    left = status.seconds_left
    spent = status.duration_s
    of = f" of {status.num_steps:,}" if status.num_steps else ""
    return row._replace(
        state=_state_text(status.state),
        tone=_TONES.get(status.state, "calm"),
        reason=status.reason,
        share=(status.step or 0) / status.num_steps if status.num_steps else 0.0,
        steps="-" if status.step is None else f"{status.step:,}{of}",
        loss=status.loss,
        eval_loss=status.eval_loss,
        rate=status.tokens_per_s,
        seconds=spent if left is None else left,
        time=f"{format_seconds(left)} left" if left is not None else "" if spent is None else format_seconds(spent),
        model="" if run.plan is None else _model_text(run.plan),
    )


def _state_text(state: RunState) -> str:
    return state.value.replace("_", " ")


def _model_text(plan: Plan) -> str:
    model = plan.job.model.name or plan.job.model.config or plan.model_shape.model_type
    return f"{model.rstrip('/').rpartition('/')[2]}, {plan.chosen.method}"


def run_content(runs: Runs, query: Query) -> Content:
    """One run, live or ended."""
    name = _only(query, "name")
    smoothing = float(_choice(query, "smooth", SMOOTHINGS))
    axis, scale = XAxis(_choice(query, "x", tuple(XAxis))), _choice(query, "scale", SCALES)
    whole = runs.whole(name)
    sections = {section.name: section for section in run_page(whole.run, smoothing=smoothing).sections}
    charts = {key: sections[key] for key in _CHARTS if key in sections}
    others = [sections[key] for key in sections if key not in (*_FOLDED, *_CHARTS, "end", "incidents")]
    folded = [section for key, section in sections.items() if key in _FOLDED]
    for key, section in charts.items():
        is_log = scale == "log" and key in _LOG_CHARTS
        blocks = (_plotted(block, whole.run, axis, is_log=is_log) for block in section.blocks)
        charts[key] = replace(section, blocks=tuple(blocks))
    plan, report = whole.run.plan, whole.run.report
    return content_of(
        "run.html",
        _tab(whole.look.view, name),
        place="/run",
        api="/api/run",
        every_s=LIVE_S if whole.is_live else IDLE_S,
        name=name,
        what="" if plan is None else run_text(plan),
        selects=(
            _select("smooth", "Smooth the loss by", SMOOTHINGS, query),
            _select("x", "X axis", tuple(XAxis), query),
            _select("scale", "Y axis", SCALES, query),
        ),
        error="" if report is None or whole.is_live else report.error or "",
        tiles=list(_tiles(whole)),
        nonce=runs.nonce,
        is_live=whole.is_live,
        has_model=(whole.run.run_dir / "export").is_dir(),
        incidents=section_html(sections["incidents"], "card") if "incidents" in sections else "",
        charts=Markup().join(_chart_card(each) for section in charts.values() for each in _single_charts(section)),
        figures=Markup().join(section_html(section, "card") for section in others),
        more=_settings(whole.run) + _log(whole.run.run_dir) + Markup().join(map(folded_html, folded)),
    )


def _single_charts(section: Section) -> Iterator[Section]:
    """The section, or, if it has several charts, one section for each."""
    if sum(isinstance(block, LineChart) for block in section.blocks) < 2:
        yield from [section] if section.blocks else []
        return
    for block in section.blocks:
        if isinstance(block, LineChart):
            yield replace(section, title=block.caption, blocks=(block,))


def _chart_card(section: Section) -> Markup:
    """A section with one chart, whose caption is shown if it adds something to the title."""
    captions = [block.caption for block in section.blocks if isinstance(block, LineChart)]
    return section_html(section, "card plain" if all(section.title in each for each in captions) else "card")


def _plotted(block: Block, run: RecordedRun, axis: XAxis, *, is_log: bool) -> Block:
    return on_axis(replace(block, is_log=is_log), run, axis) if isinstance(block, LineChart) else block


def _settings(run: RecordedRun) -> Markup:
    """The settings of the job, those that are not the defaults first."""
    if run.plan is None:
        return Markup()
    written = "\n".join(tail_lines(run.run_dir / "job.yaml", _MOST_SETTINGS_BYTES))
    changed = Section(title="settings", name="settings", blocks=(Sentence(text=_CHANGED), settings_table(run.plan.job)))
    every = (Quote(label="all settings, with where each is from: job.yaml", text=written),) if written else ()
    return folded_html(replace(changed, blocks=(*changed.blocks, *every)))


_CHANGED = "that differ from the defaults:"


def _log(run_dir: Path) -> Markup:
    """The last lines that the run printed."""
    found = last_lines(run_dir / CONSOLE_LOG, _NUM_LOG_LINES)
    if not found:
        return Markup()
    title = f"log, last {len(found)} lines"
    return folded_html(Section(title=title, name="log", blocks=(Quote(label=CONSOLE_LOG, text="\n".join(found)),)))


def _tab(view: LiveView, name: str) -> str:
    """`62% name`, the title of the window."""
    return f"{int(100 * (view.step or 0) / view.num_steps)}% {name}" if view.num_steps else name


def _tiles(whole: WholeRun) -> Iterator[Tile]:
    """The state of a run in a row of figures."""
    view, judged, run = whole.look.view, whole.look.judged, whole.run
    report = run.report
    of = f" of {view.num_steps:,}" if view.num_steps else ""
    left = "" if view.seconds_left is None else f"{format_seconds(view.seconds_left)} left"
    spent = "" if report is None or whole.is_live else f"{format_seconds(report.duration_s)} in all"
    if spent and report is not None and report.predicted_s is not None:
        spent += f", predicted {format_seconds(report.predicted_s)}"
    attempt = f"attempt {view.attempt}" if view.attempt > 1 else ""
    yield Tile(
        "state",
        _state_text(judged.state),
        (f"step {view.step or 0:,}{of}", attempt, left or spent or view.state),
        share=(view.step or 0) / view.num_steps if view.num_steps else 0.0,
        tone=_TONES.get(judged.state, "calm"),
    )
    loss = view.loss if view.loss is not None else run.final_loss
    if loss is not None:
        held_out = f"held-out {view.eval_loss:.4f}" if view.eval_loss is not None else ""
        lr = f"learning rate {view.lr:.3g}" if view.lr is not None else ""
        yield Tile("loss", f"{loss:.4f}", (held_out, lr))
    rate, expected = view.tokens_per_s, view.predicted_tokens_per_s
    if rate:
        compared = f"{rate / expected:.0%} of the predicted {format_count(expected)}" if expected else ""
        mfu = f"MFU {view.mfu:.1%}" if view.mfu is not None else ""
        share = rate / expected if expected else None
        yield Tile(
            "tokens/s",
            format_count(rate),
            (f"over the {view.rate_of.removeprefix('the ')}", compared, mfu),
            share=share,
        )
    if view.memory is not None and (view.memory.used_bytes or view.memory.peak_bytes):
        yield _memory_tile(view.memory)
    card = view.card
    figures = (
        (card.utilization, "{:.0%} busy"), (card.power_w, "{:.0f} W"), (card.temperature_c, "{} °C"),
        (card.throttle, "slowed by {}"),
    )  # fmt: skip
    first, *others = [*(form.format(figure) for figure, form in figures if figure is not None), ""]
    if first:
        yield Tile("GPU of rank 0", first, others)


def _memory_tile(gauge: MemoryGauge) -> Tile:
    """Memory in use against the card or the RAM, with a mark at the prediction."""
    used, total = gauge.used_bytes or gauge.peak_bytes or 0, gauge.total_bytes
    share = used / total if total else None
    of = f"of {format_bytes(total)} {gauge.place}" if total else ""
    peak = f"{gauge.peak_name} {format_bytes(gauge.peak_bytes)}" if gauge.peak_bytes else ""
    expected = f"predicted {format_bytes(gauge.predicted_peak_bytes)}" if gauge.predicted_peak_bytes else ""
    return Tile(
        "memory" if gauge.place == "card" else PROCESS_RAM,
        format_bytes(used),
        (of, ", ".join(filter(None, (peak, expected)))),
        share=share,
        mark=gauge.predicted_bytes / total if gauge.predicted_bytes and total else None,
        is_full=share is not None and share >= _FULL_SHARE,
    )


def comparison_content(runs: Runs, query: Query) -> Content:
    """Several runs side by side."""
    names = list(dict.fromkeys(query.get("run", [])))
    if not 2 <= len(names) <= MOST_COMPARED:
        reason = f"select 2 to {MOST_COMPARED} runs in the list, and then Compare selected"
        return message("Nothing to compare" if len(names) < 2 else "Too many runs", reason, place="/compare")
    wholes = [runs.whole(name) for name in names]
    page = comparison_page([whole.run for whole in wholes], axis=XAxis(_choice(query, "x", tuple(XAxis))))
    parts = {True: Markup(), False: Markup()}
    for section in page.sections:
        parts[_has_chart(section)] += _chart_card(section)
    return content_of(
        "compare.html",
        page.title,
        place="/compare",
        api="/api/compare",
        every_s=LIVE_S if any(whole.is_live for whole in wholes) else IDLE_S,
        names=names,
        selects=(_select("x", "X axis", tuple(XAxis), query),),
        figures=parts[False],
        charts=parts[True],
    )


def chat_content(runs: Runs, query: Query) -> Content:
    """The conversation with the model of a run."""
    name = _only(query, "name")
    if name not in runs.names():
        raise InputError(f"{name}: there is no such run in {runs.folder}")
    talk = runs.chats.talk(name)
    return content_of(
        "chat.html",
        f"chat: {name}",
        place="/chat",
        api="/api/chat",
        every_s=LIVE_S if talk.waiting else 0.0,
        name=name,
        nonce=runs.nonce,
        most=MOST_TURNS,
        longest=LONGEST_QUESTION,
        waited_s=time.monotonic() - talk.since_s,
        **talk._asdict(),
    )


def _has_chart(section: Section) -> bool:
    return any(isinstance(block, LineChart) for block in section.blocks)


def section_html(section: Section, names: str = "") -> Markup:
    """A section whose line charts can be read with the pointer and the keyboard."""
    return Markup('<section class="{}"><h2>{}</h2>{}</section>').format(names, section.title, _blocks(section.blocks))


def folded_html(section: Section) -> Markup:
    """A section of which the title is shown until it is opened."""
    return Markup('<details class="card" data-id="{}"><summary>{}</summary>{}</details>').format(
        section.name, section.title, _blocks(section.blocks)
    )


def _blocks(blocks: Iterable[Block]) -> Markup:
    """Charts and tables, which block_html escapes."""
    return Markup("\n").join(
        _plot(block) if isinstance(block, LineChart) else Markup("\n".join(block_html(block)))  # noqa: S704
        for block in blocks
    )


def _plot(chart: LineChart) -> Markup:
    """A chart with its figures as text, for `ui.js`."""
    axes = axes_of(chart)
    if axes is None:
        return Markup()
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
    return Markup(
        '<figure class="plot" tabindex="0" data-id="{0}" aria-label="{0}; arrow keys read its figures" '
        'data-chart="{1}">{2}</figure>'
    ).format(
        chart.caption,
        msgspec.json.encode(figures).decode(),
        Markup("".join(line_chart_html(chart))),  # noqa: S704 - escaped by line_chart_html
    )


def _choice(query: Query, name: str, choices: Sequence[str]) -> str:
    """The choice of a query, the first one if it has none of them."""
    text = query.get(name, [""])[0]
    return text if text in choices else str(choices[0])


def _select(name: str, label: str, choices: Sequence[str], query: Query) -> tuple[str, str, list[tuple[str, str]], str]:
    """What the macro `select` shows."""
    return name, label, [(each, each) for each in choices], _choice(query, name, choices)


def _only(query: Query, name: str) -> str:
    values = query.get(name, [])
    if len(values) != 1:
        raise InputError(f"the address has no {name}")
    return values[0]
