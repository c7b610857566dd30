"""What `make bench` runs: each benchmark compares commands in turn, A B A B, in one run, and prints ratios of medians.

    python benchmarks/run.py [NAME ...] [--write]      --write keeps the table under benchmarks/results/

startup   how long `probe`, `plan`, `report` take cold, beside an empty Python and beside `import torch`
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 7


def time_in_turn(commands: dict[str, list[str]], *, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Wall seconds of each command, one after the other in every round; one warm-up round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, argv in commands.items():
            started = time.perf_counter()
            subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def bench_startup() -> list[dict[str, object]]:
    """Commands that answer questions, cold, beside what they must not cost."""
    shardwise = [sys.executable, "-P", "-m", "launch.cli"]
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


BENCHMARKS: dict[str, Callable[[], list[dict[str, object]]]] = {"startup": bench_startup}


def machine() -> dict[str, object]:
    """What the figures were taken on."""
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


def table(rows: list[dict[str, object]]) -> str:
    """Rows as aligned columns."""
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def main() -> int:
    """Runs the named benchmarks, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="default: all")
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    options = parser.parse_args()
    for name in options.names or BENCHMARKS:
        rows = BENCHMARKS[name]()
        print(f"\n{name}, {ROUNDS} rounds in turn, {machine()['cpu']}")
        print(table(rows))
        if options.write:
            now = datetime.now(UTC)
            path = ROOT / "benchmarks" / "results" / f"{name}-{now:%Y-%m-%d}.json"
            path.write_text(
                json.dumps({"machine": machine(), "date": f"{now:%Y-%m-%d}", "rows": rows}, indent=1) + "\n"
            )
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
