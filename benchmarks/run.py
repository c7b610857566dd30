"""The benchmarks of `make bench`. Timed commands alternate, A B A B, in one run; results are ratios of medians.

    python benchmarks/run.py [NAME ...] [--write]      --write stores the table under benchmarks/results/
    python benchmarks/run.py first_step --against DIR  compared with another checkout, alternating

startup     cold start time of `probe`, `plan`, `report`, compared with an empty Python and with `import torch`
first_loss  wall seconds and lines from the command to the first loss of the quickstart, nothing prepared or compiled
first_step  processor seconds of a rank from its start to its first step (`first_step.py`)
estimate    cases per second and memory of `shardwise estimate`, for a few and for many cases
accuracy    errors of the predictions on published measurements, and those of other tools (`accuracy.py`)
ledger      docs/ledger.md, every measured run with its prediction (`ledger.py`)
trainers    tokens per second of a step, compared with a bare loop, transformers' Trainer and TRL's (`trainers.py`)

The column `verdict` compares a figure with its target; the exit code is 1 if one is MISSED.
"""

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import ledger
from accuracy import run_accuracy, text_table
from first_step import bench_first_step
from trainers import bench_trainers
from written_page import with_tables

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 7


def time_in_turn(commands: dict[str, list[str]], *, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Wall seconds of each command, one after the other in every round, after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, argv in commands.items():
            started = time.perf_counter()
            subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def bench_startup() -> list[dict[str, object]]:
    """Cold start of commands that do not train, compared with `import torch`."""
    shardwise = [sys.executable, "-P", "-m", "shardwise.launch.cli"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
        "shardwise --version": [*shardwise, "--version"],
        "shardwise schema": [*shardwise, "schema"],
        "shardwise probe": [*shardwise, "probe"],
        "shardwise plan examples/quickstart.yaml": [*shardwise, "plan", "examples/quickstart.yaml"],
        "shardwise plan examples/8x80gb-node.yaml, 8 x H100": [
            *shardwise, "plan", "examples/8x80gb-node.yaml", "--hardware", "8xH100-SXM5-80GB",
        ],
        "shardwise plan Qwen/Qwen2.5-7B, RTX 4060": [*shardwise, "plan", "Qwen/Qwen2.5-7B", "--hardware", "RTX 4060"],
        "shardwise plan meta-llama/Llama-3.1-70B, 8 x H100": [
            *shardwise, "plan", "meta-llama/Llama-3.1-70B", "--hardware", "8xH100-SXM5-80GB",
        ],
        "shardwise plan examples/2x24gb-cards.yaml, 2 x RTX 4090": [
            *shardwise, "plan", "examples/2x24gb-cards.yaml", "--hardware", "2xRTX-4090",
        ],
    }  # fmt: skip
    seconds = time_in_turn(commands)
    torch = statistics.median(seconds["python -c 'import torch'"])
    return [
        {
            "command": name,
            "median_s": round(statistics.median(values), 3),
            "min_s": round(min(values), 3),
            "max_s": round(max(values), 3),
            "ratio_to_import_torch": round(statistics.median(values) / torch, 2),
        }
        for name, values in seconds.items()
    ]


FIRST_LOSS_S, FIRST_LOSS_LINES = 12.0, 30


def bench_first_loss() -> list[dict[str, object]]:
    """Starts of the quickstart in an empty HOME, each until the line of its first loss; two idle cores are assumed."""
    starts = [_first_loss() for _ in range(3)]
    median, most_lines = statistics.median(seconds for seconds, _ in starts), max(lines for _, lines in starts)
    is_met = median <= FIRST_LOSS_S and most_lines <= FIRST_LOSS_LINES
    return [
        {
            "command": "shardwise train examples/quickstart.yaml",
            "median_s": round(median, 1),
            "max_s": round(max(seconds for seconds, _ in starts), 1),
            "lines_before": most_lines,
            "target": f"at most {FIRST_LOSS_S:.0f} s and {FIRST_LOSS_LINES} lines",
            "verdict": "met" if is_met else "MISSED",
        }
    ]


def _first_loss() -> tuple[float, int]:
    """Seconds to the first loss, and the number of lines before it."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as home:
        environment = os.environ | {"HOME": home, "PYTHONUNBUFFERED": "1"}
        for name in ("XDG_CACHE_HOME", "HF_HOME", "SHARDWISE_CACHE"):
            environment.pop(name, None)
        argv = [sys.executable, "-P", "-m", "shardwise.launch.cli", "train", str(ROOT / "examples" / "quickstart.yaml")]
        argv += ["--run-dir", f"{home}/run"]
        started = time.perf_counter()
        with subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for number, line in enumerate(run.stdout):
                if "] 1/" in line and "  loss " in line:
                    seconds = time.perf_counter() - started
                    run.send_signal(signal.SIGINT)
                    run.communicate()
                    return seconds, number
    raise RuntimeError("the quickstart ended before its first loss")


def bench_estimate() -> list[dict[str, object]]:
    """A stream of different cases in one process: the published rows with other batches and sequence lengths."""
    return [_estimate(num_cases) for num_cases in (1000, 10_000, 30_000)]


def _estimate(num_cases: int) -> dict[str, object]:
    rows = [
        json.loads(line)["case"] for line in (ROOT / "benchmarks" / "measured_public.jsonl").read_text().splitlines()
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as cases:
        for number in range(num_cases):
            case = rows[number % len(rows)]
            sizes = {"micro_batch": 1 + number % 32, "seq_len": 256 + number}
            cases.write(json.dumps(case | {"id": str(number), "train": case["train"] | sizes}) + "\n")
        cases.flush()
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        argv = [sys.executable, "-P", "-c", _ESTIMATE, cases.name]
        run = subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    # One process without a pause: on an idle machine its processor time equals wall time.
    rate = num_cases / (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {
        "cases": num_cases,
        "cases_per_s_of_cpu": round(rate),
        "cases_per_s": round(num_cases / seconds),
        "peak_rss_mib": round(int(run.stderr) / 1024, 1),
        "target": "2000 a second of processor time, start included",
        "verdict": "met" if rate >= 2000 else "MISSED",
    }


_ESTIMATE = """
import re, sys
from pathlib import Path
from shardwise.launch.cli import main
assert main(["estimate", sys.argv[1]]) == 0
print(re.search("VmHWM:(.*)kB", Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


def machine() -> dict[str, object]:
    """The machine and versions of the figures."""
    return {
        "cpu": next(
            (
                line.partition(":")[2].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            platform.processor(),
        ),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("shardwise", "torch", "accelerate", "deepspeed")},
        "load_average": round(float(Path("/proc/loadavg").read_text().split()[0]), 2),
    }


def run_table(name: str, bench: Callable[[], list[dict[str, object]]], *, write: bool) -> bool:
    """Runs a benchmark of one table, prints it, stores it with `write`; false if it missed a target."""
    rows = bench()
    print(f"\n{name}, {machine()['cpu']}")
    print(text_table(rows))
    if write:
        now = datetime.now(UTC)
        path = ROOT / "benchmarks" / "results" / f"{name}-{now:%Y-%m-%d}.json"
        path.write_text(json.dumps({"machine": machine(), "date": f"{now:%Y-%m-%d}", "rows": rows}, indent=1) + "\n")
        print(f"wrote {path.relative_to(ROOT)}")
    return all(row.get("verdict") != "MISSED" for row in rows)


def renew_ledger(*, write: bool) -> bool:
    """Writes docs/ledger.md."""
    page = ledger.DOCUMENT
    page.write_text(with_tables(page.read_text(), ledger.tables()))
    print(f"wrote {page.relative_to(ROOT)}")
    return True


BENCHMARKS: dict[str, Callable[..., bool]] = {
    "startup": partial(run_table, "startup", bench_startup),
    "first_loss": partial(run_table, "first_loss", bench_first_loss),
    "first_step": partial(run_table, "first_step", bench_first_step),
    "estimate": partial(run_table, "estimate", bench_estimate),
    "accuracy": run_accuracy,
    "ledger": renew_ledger,
    "trainers": partial(run_table, "trainers", bench_trainers),
}


def main() -> int:
    """Runs the named benchmarks, or all of them; 1 if one missed a target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="default: all")
    parser.add_argument("--write", action="store_true", help="store the figures under benchmarks/results/")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, for first_step")
    options = parser.parse_args()
    names = options.names or list(BENCHMARKS)
    if options.against is not None and names != ["first_step"]:
        parser.error("--against works only with first_step")
    chosen = dict(BENCHMARKS)
    if options.against is not None:
        chosen["first_step"] = partial(run_table, "first_step", partial(bench_first_step, against=options.against))
    verdicts = [chosen[name](write=options.write) for name in names]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
