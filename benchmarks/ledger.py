"""The ledger, docs/ledger.md: every measured run that is known, with its prediction and the ratio of both.

python benchmarks/ledger.py            prints the tables
python benchmarks/ledger.py --write    writes them into docs/ledger.md
python benchmarks/ledger.py --check    checks that the page is up to date (exit code 1 if it is not)

Runs of others: measured_public.jsonl, measured_unfitted.jsonl and measured_judging.jsonl, predicted today; odd rows of
the last (`judging`) have no prediction here before they were scored. Own runs: results/nvidia-*.json, each with the
prediction of its day. Rows of users (`shardwise report --share`): measured_shared.jsonl, with theirs.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy import GIB, percentile  # noqa: E402  (the path comes first)
from judging import is_below, is_even, stored_odd  # noqa: E402
from written_page import markdown_table, run_page  # noqa: E402

DOCUMENT = ROOT / "docs" / "ledger.md"
FILES = ("measured_public", "measured_unfitted", "measured_judging")
SHARED = ROOT / "benchmarks" / "measured_shared.jsonl"
COUNTERS = {
    "tokens_per_s_per_gpu": "tokens/s",
    "peak_allocated_gib": "peak allocated",
    "peak_reserved_gib": "peak reserved",
    "device_gib": "device",
}
# Years of the measurements of sources that state no date for a row.
YEARS = {
    "foundation-model-stack/fms-acceleration": "2024",
    "mosaicml/llm-foundry": "2023",
    "meta-pytorch/torchtune": "2024",
    "KempnerInstitute/KempnerForge": "2026",
    "AnswerDotAI/fsdp_qlora": "2024",
    "pytorch/torchtitan": "2024",
}
FITTED = "constants were fitted to it"
USE = {
    "measured_public": FITTED,
    "measured_unfitted": "nothing fitted",
    "measured_judging": "nothing fitted",
}


class Entry(NamedTuple):
    """A measured run; `figures` has (predicted, measured) by counter."""

    id: str
    year: str
    card: str
    num_gpus: int
    engine: str
    trainer: str
    model: str
    settings: str
    source: str
    use: str
    figures: dict[str, tuple[float, float]]

    @property
    def ratios(self) -> dict[str, float]:
        """Prediction by measurement."""
        return {counter: predicted / measured for counter, (predicted, measured) in self.figures.items()}

    @property
    def distance(self) -> float:
        """The worst of its ratios, as a factor of 1 or more."""
        return max(max(ratio, 1 / ratio) for ratio in self.ratios.values())

    @property
    def is_below_parity(self) -> bool:
        return any(is_below(counter, ratio) for counter, ratio in self.ratios.items())


class Ledger(NamedTuple):
    """Entries with a figure on both sides, and (run, source, reason) of others."""

    entries: tuple[Entry, ...]
    others: tuple[tuple[str, str, str], ...]


def read_ledger() -> Ledger:
    """Every run."""
    entries: list[Entry] = []
    others: list[tuple[str, str, str]] = []
    for file in FILES:
        for line in (ROOT / "benchmarks" / f"{file}.jsonl").read_text().splitlines():
            found = _public_entry(json.loads(line), file)
            entries.append(found) if isinstance(found, Entry) else others.append(found)
    entries += [*_own_entries(), *_shared_entries()]
    return Ledger(tuple(sorted(entries, key=lambda entry: (-entry.distance, entry.id))), tuple(others))


def _public_entry(row: dict[str, Any], file: str) -> Entry | tuple[str, str, str]:
    from shardwise.trainer.planning.cases import estimate_case, read_case

    case, truth, source = row["case"], row["truth"], _short_source(row["source"])
    if file == "measured_judging" and not is_even(row["source"]) and stored_odd() is None:
        return row["id"], source, "not scored yet: an odd row"
    prediction = estimate_case(case)
    if "error" in prediction:
        return row["id"], source, prediction["error"].partition(";")[0]
    if truth.get("oom"):
        verdict = "called fitting" if prediction["fits"] else "as predicted"
        return row["id"], source, f"ran out of memory, {verdict}"
    read, hardware = read_case(case), case["hardware"]
    repository = row["source"].partition(" ")[0]
    return Entry(
        id=row["id"],
        year=row.get("date", YEARS.get(repository, ""))[:4],
        card=hardware["gpu"],
        num_gpus=read.device.num_devices,
        engine=case["train"]["sharding"],
        trainer=case["stack"],
        model=f"{case['model']['model_type']} {_billions(read.shape.num_parameters)}",
        settings=_settings(case["train"], hardware),
        source=source,
        use=USE[file],
        figures={
            counter: (_predicted(prediction, counter), truth[counter]) for counter in COUNTERS if counter in truth
        },
    )


def _predicted(prediction: dict[str, Any], counter: str) -> float:
    if counter == "tokens_per_s_per_gpu":
        return float(prediction["speed"][counter])
    return float(prediction["memory"][counter.replace("_gib", "_bytes")]) / GIB


def _settings(train: dict[str, Any], hardware: dict[str, Any]) -> str:
    nodes = hardware.get("nodes", 1)
    cards = f"{nodes}x{hardware['gpus_per_node']}" if nodes > 1 else str(hardware["gpus_per_node"])
    offload = train.get("offload", "none")
    parts = (
        f"{cards} GPU{'s' * (cards != '1')}",
        f"{train['method']}{_rank(train)} {train['precision']}",
        f"{train['micro_batch']}x{train['seq_len']}" + (f" x{train['grad_accum']}" * (train["grad_accum"] > 1)),
        f"recompute {train['checkpointing']}" if train["checkpointing"] != "none" else "",
        f"loss {train['loss']}",
        "compiled" if train.get("compile") else "",
        f"offload {offload}" if offload != "none" else "",
        "activations in host RAM" if train.get("activation_offload") else "",
    )
    return ", ".join(part for part in parts if part)


def _rank(train: dict[str, Any]) -> str:
    return f" r{train['lora_rank']}" if train.get("lora_rank") else ""


def _billions(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.2g}B" if num_parameters < 1e10 else f"{num_parameters / 1e9:.0f}B"


def _short_source(source: str) -> str:
    """Repository and the last part of the path, without what the settings repeat."""
    repository, _, rest = source.partition(" ")
    name = rest.rpartition("/")[2].removesuffix(".json").removeprefix("benchmark-")
    return f"{repository.rpartition('/')[2]} {name}".strip()


def _own_entries() -> Iterator[Entry]:
    for path in sorted((ROOT / "benchmarks" / "results").glob("nvidia-*.json")):
        content = json.loads(path.read_text())
        for part, rows in content["parts"].items():
            for name, row in rows.items():
                figures = _own_figures(row.get("result", {}))
                if figures:
                    yield _own_entry(f"{part}: {name}", row["result"], content, path.stem, figures)


def _own_figures(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    predicted, measured = result.get("predicted", {}), result.get("measured", {})
    found: dict[str, tuple[float, float]] = {}
    for counter in COUNTERS:
        group, name, unit = ("memory", counter.replace("_gib", "_bytes"), GIB)
        if counter == "tokens_per_s_per_gpu":
            group, name, unit = "speed", counter, 1
        pair = predicted.get(group, {}).get(name), measured.get(group, {}).get(name)
        if pair[0] and pair[1]:
            found[counter] = (pair[0] / unit, pair[1] / unit)
    return found


def _own_entry(
    name: str, result: dict[str, Any], content: dict[str, Any], source: str, figures: dict[str, tuple[float, float]]
) -> Entry:
    sharding, precision, optimizer = result["strategy"].split("/")
    recomputed = "" if result["checkpointing"] == "none" else f", recompute {result['checkpointing']}"
    return Entry(
        id=f"own {name}",
        year=content["date"][:4],
        card=content["hardware"]["gpus"][0]["spec_name"],
        num_gpus=1,
        engine=sharding.partition("+")[0],
        trainer="shardwise",
        model="llama 0.16B" if name.startswith("engines") else name.partition(": ")[2].partition(" ")[0],
        settings=f"{optimizer} {precision}, micro batch {result['micro_batch']}{recomputed}",
        source=source,
        use="own",
        figures=figures,
    )


def _shared_entries() -> Iterator[Entry]:
    """Rows that `shardwise report --share` wrote."""
    if SHARED.exists():
        for number, line in enumerate(SHARED.read_text().splitlines(), 1):
            yield shared_entry(f"shared {number}", json.loads(line))


def shared_entry(name: str, row: dict[str, Any]) -> Entry:
    """The entry of one row of `shardwise report --share`."""
    settings, hardware = row["settings"], row["hardware"]
    figures = {
        counter: (row["predicted"][counter], row["measured"][counter])
        for counter in COUNTERS
        if counter in row["predicted"] and counter in row["measured"]
    }
    return Entry(
        id=name,
        year=row["month"][:4],
        card=hardware["device"],
        num_gpus=settings["num_ranks"],
        engine=settings["sharding"],
        trainer="shardwise",
        model=f"{row['model']['model_type']} {_billions(row['model']['num_parameters'])}",
        settings=f"{settings['num_ranks']} GPUs, {settings['method']} {settings['precision']}, "
        f"{settings['micro_batch']}x{settings['seq_len']}",
        source=f"report --share {row['month']}",
        use="shared",
        figures=figures,
    )


def tables() -> dict[str, str]:
    """The generated parts of the page by the name of their markers."""
    ledger = read_ledger()
    entries = ledger.entries
    return {
        "ledger-summary": f"{summary(ledger)}\n",
        "ledger-use": _group_table(entries, "used for", lambda entry: entry.use),
        "ledger-engines": _group_table(entries, "engine", lambda entry: entry.engine),
        "ledger-trainers": _group_table(entries, "trainer", lambda entry: entry.trainer),
        "ledger-cards": _group_table(entries, "card", lambda entry: entry.card),
        "ledger-years": _group_table(entries, "year", lambda entry: entry.year),
        "ledger-rows": _rows_table(entries),
        "ledger-others": markdown_table(
            ["run", "source", "why it has no ratio"], [list(each) for each in ledger.others]
        ),
    }


def summary(ledger: Ledger) -> str:
    """The sentence at the top of the page."""
    entries = ledger.entries
    not_fitted = [entry for entry in entries if entry.use != FITTED]
    below = sum(entry.is_below_parity for entry in entries) / len(entries)
    speeds, peaks = (_ratios(not_fitted, is_speed=is_speed) for is_speed in (True, False))
    return (
        f"{len(entries) + len(ledger.others)} measured runs, {len(entries)} with a ratio; {below:.0%} are below parity "
        f"in a counter. Of those that nothing was fitted to, half of {len(speeds)} speeds are within "
        f"{percentile([abs(ratio - 1) for ratio in speeds], 0.5):.0%} and nine in ten within "
        f"{percentile([abs(ratio - 1) for ratio in speeds], 0.9):.0%}; of {len(peaks)} peaks "
        f"{percentile([abs(ratio - 1) for ratio in peaks], 0.5):.0%} and "
        f"{percentile([abs(ratio - 1) for ratio in peaks], 0.9):.0%}."
    )


def statement() -> str:
    """The sentence of README.md."""
    ledger = read_ledger()
    not_fitted = [entry for entry in ledger.entries if entry.use != FITTED]
    shares = [
        f"{percentile([abs(ratio - 1) for ratio in _ratios(not_fitted, is_speed=is_speed)], share):.0%}".replace(
            "%", " %"
        )
        for is_speed in (True, False)
        for share in (0.5, 0.9)
    ]
    return (
        f"[Ledger](docs/ledger.md), {len(ledger.entries) + len(ledger.others)} measured runs: where nothing was "
        f"fitted, half the speeds are within {shares[0]}, nine in ten within {shares[1]}, of peaks {shares[2]} and "
        f"{shares[3]}"
    )


def _ratios(entries: Sequence[Entry], *, is_speed: bool) -> list[float]:
    return [
        ratio
        for entry in entries
        for counter, ratio in entry.ratios.items()
        if (counter == "tokens_per_s_per_gpu") == is_speed
    ]


def _group_table(entries: Sequence[Entry], title: str, key: Callable[[Entry], str]) -> str:
    lines = []
    for name in sorted({key(entry) for entry in entries}):
        group = [entry for entry in entries if key(entry) == name]
        cells = [name, str(len(group))]
        for is_speed in (True, False):
            errors = [abs(ratio - 1) for ratio in _ratios(group, is_speed=is_speed)]
            cells += [f"{percentile(errors, 0.5):.1%}", f"{percentile(errors, 0.9):.1%}"] if errors else ["", ""]
        lines.append([*cells, f"{sum(entry.is_below_parity for entry in group) / len(group):.0%}"])
    header = [title, "runs", "speed, median", "speed, 90th", "memory, median", "memory, 90th", "below parity"]
    return markdown_table(header, lines)


def _rows_table(entries: Sequence[Entry]) -> str:
    header = ["run", "year", "card", "trainer", "engine", "model", "settings", "predicted / measured", "source"]
    return markdown_table(header, [_row(entry) for entry in entries])


def _row(entry: Entry) -> list[str]:
    figures = ", ".join(
        f"{COUNTERS[counter]} {_number(predicted)} / {_number(measured)} = {predicted / measured:.2f}"
        for counter, (predicted, measured) in entry.figures.items()
    )
    about = (entry.year, entry.card, entry.trainer, entry.engine, entry.model, entry.settings)
    return [entry.id, *about, figures, entry.source]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(run_page(DOCUMENT, tables, command=__file__, summary=str(__doc__).splitlines()[0]))
