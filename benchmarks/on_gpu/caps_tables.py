"""The tables of piece `caps`: what was taken under each cap and what it lost, and behind it all that was run."""

from collections.abc import Mapping, Sequence

from written_page import markdown_table

from on_gpu.caps_contenders import MORE_SETTINGS_WORDS, MOST, MOST_TINY, NEAR
from on_gpu.caps_rows import Entry, Job, jobs_of
from on_gpu.case import Outcome
from on_gpu.pieces import Row
from trainer.spec.units import format_bytes

_WHY = ("micro batch", "checkpointing")  # of the reasons of a choice, those that the cap decides
_HEAD = (
    "cap", "job", "takes", "because", "predicted need", "device, allocated", "with a quarter more", "tokens/s",
    "best other, tokens/s", "regret",
)  # fmt: skip
_ALL_HEAD = (
    "contender", "predicted need", "host RAM", "tokens/s, predicted", "tokens/s", "allocated", "device",
    "resident in host RAM", "outcome",
)  # fmt: skip


def tables(rows: Mapping[str, Row]) -> dict[str, str]:
    """Markdown for the place `caps`."""
    jobs = jobs_of(rows)
    if not jobs:
        return {"caps": "Nothing was run yet.\n"}
    parts = [
        _introduction(jobs),
        markdown_table(_HEAD, [_cells(job) for job in jobs]),
        _problems(rows),
        *(_all_of(job) for job in jobs if job.plan.entries),
    ]
    return {"caps": "\n".join(part for part in parts if part)}


def _introduction(jobs: Sequence[Job]) -> str:
    plan = jobs[0].plan
    most = MOST_TINY if plan.is_rehearsal else MOST
    if plan.is_rehearsal:
        where = (
            f"A rehearsal on a CPU ({plan.device}) with tiny models: a cap of so many GiB is a place between the least "
            "that the job can do with and what it would take unlimited, and shares are of what it grants beside the "
            "process. The limit that is set leaves the process out, so that hardly anything runs out of memory, and "
            "steps of a few milliseconds differ by chance. It proves the script and nothing else."
        )
    else:
        where = f"Measured on {plan.device}, whose allocator was held to each cap; device bytes are the process's."
    what = (
        "Each job fixes the model, the rows, the method and the tokens of a step; the rest is the planner's. At most "
        f"{most} of what it could have taken run a few steps each: the choice, the other candidates of its plan, "
        f"{MORE_SETTINGS_WORDS}, and what was ruled out for {NEAR:.0%} of memory or less. Regret is what the choice "
        "lacks of the fastest that ran within the cap, by the same method and as exact."
    )
    return f"{where}\n\n{what}\n"


def _cells(job: Job) -> tuple[str, ...]:
    plan = job.plan
    if plan.reason is not None:
        return (f"{plan.cap_gib} GiB", plan.job, "nothing", plan.reason, *["-"] * 6)
    best = job.best_other
    best_words = "-" if best is None else f"{_code(best)}, {_count(job.tokens_per_s(best))}"
    return (
        f"{plan.cap_gib} GiB" + (f" ({format_bytes(plan.cap_bytes)} here)" if plan.is_rehearsal else ""),
        f"{plan.job}; {plan.sequences_per_step} x {plan.seq_len} tokens a step",
        _code(plan.choice),
        _because(job),
        f"{format_bytes(plan.choice.need_bytes)}, {plan.share(plan.choice.need_bytes):.0%}{_host_words(job)}",
        _used(job),
        _more(job),
        _count(job.tokens_per_s(plan.choice)) if job.chosen_run else "not run",
        best_words,
        "-" if job.regret is None else f"{job.regret:.1%}" + ("" if job.is_whole else " so far"),
    )


def _because(job: Job) -> str:
    reasons = [reason for reason in job.plan.why if reason.startswith(_WHY)]
    return "; ".join(reasons or job.plan.why[:1])


def _host_words(job: Job) -> str:
    """Of host RAM, where a choice keeps anything there that is worth a word."""
    need, num_parameters = job.plan.choice.host_bytes, job.plan.num_parameters
    if not need or not num_parameters:
        return ""
    return f"; host {format_bytes(need)}, {need / num_parameters:.1f} bytes a parameter"


def _used(job: Job) -> str:
    run = job.chosen_run
    if run is None:
        return "not run"
    used, share = job.used_bytes(run), job.used_share
    if used is None or share is None or run.result is None:
        return str(run.outcome)
    peak = run.result.measured.memory.peak_allocated_bytes or 0
    allocated = f"{format_bytes(peak)}, {job.plan.share(peak + job.plan.context_bytes):.0%}"
    return f"{allocated}" if job.plan.is_rehearsal else f"{format_bytes(used)}, {share:.0%}; {allocated}"


def _more(job: Job) -> str:
    more = job.plan.more_memory
    if more is None:
        return "-"
    if not more.is_better:
        return "no faster"
    exact = "which is exact, " if more.is_truer else ""
    return f"`{more.key}`, {exact}predicted {job.plan.choice.step_s / more.step_s:.2f}x as fast"


def _problems(rows: Mapping[str, Row]) -> str:
    """Steps that came to nothing; whether goals are met is said in the table of goals."""
    raised = [f"- {name}: {row['error']}\n" for name, row in rows.items() if "error" in row]
    return "Steps that failed:\n\n" + "".join(raised) if raised else ""


def _all_of(job: Job) -> str:
    plan = job.plan
    ordered = sorted(plan.entries, key=lambda entry: -(job.tokens_per_s(entry) or 0.0))
    table = markdown_table(_ALL_HEAD, [_all_cells(job, entry) for entry in ordered])
    left = f", {plan.num_left_out} left out" if plan.num_left_out else ""
    summary = f"{plan.name}: {len(plan.entries)} contenders{left}; the plan has {plan.num_candidates} candidates"
    return f"<details><summary>{summary}</summary>\n\n{table}\n</details>\n"


def _all_cells(job: Job, entry: Entry) -> tuple[str, ...]:
    run = job.runs.get(entry.key)
    memory = run.result.measured.memory if run is not None and run.result is not None else None
    return (
        _code(entry),
        format_bytes(entry.need_bytes),
        format_bytes(entry.host_bytes) if entry.host_bytes else "-",
        _count(entry.tokens_per_s),
        _count(job.tokens_per_s(entry)),
        "-" if memory is None else _bytes(memory.peak_allocated_bytes),
        "-" if memory is None else _bytes(memory.device_bytes),
        "-" if memory is None else _bytes(memory.host_bytes),
        _outcome(job, entry),
    )


def _outcome(job: Job, entry: Entry) -> str:
    run = job.runs.get(entry.key)
    if run is None:
        return "not run"
    words = [str(run.outcome) + (f" ({run.reason})" if run.outcome is not Outcome.RAN and run.reason else "")]
    if entry.is_choice:
        words.append("the choice")
    elif run.outcome is Outcome.RAN and not job.counts(entry):
        words.append("does not count: " + _why_not(job, entry))
    if entry.beyond is not None:
        words.append(f"was ruled out: {entry.beyond}")
    return "; ".join(words)


def _why_not(job: Job, entry: Entry) -> str:
    if not entry.is_faithful:
        return "changes the update more than the choice does"
    if entry.is_beyond_host:
        return "takes host RAM that the job does not grant"
    return "took more than the cap" if not job.is_within(job.runs[entry.key]) else "was not timed"


def _code(entry: Entry) -> str:
    return f"`{entry.key}`"


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def _count(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
