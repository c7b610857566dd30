"""The savings of each technique on this machine's CPU; writes the table of docs/techniques.md.

    python benchmarks/techniques.py            measures, prints the table
    python benchmarks/techniques.py --write    measures, stores the figures under benchmarks/results/, writes the table

One process trains a small Llama for a few steps with each technique, with the trainer of the ranks, and reads peak and
steady allocated bytes of the profiled step. The predicted peak is the planner's.
"""

import argparse
import gc
import json
import os
import re
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "tests" / "factories", ROOT / "benchmarks", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from gpu_factory import GpuCase, gpu_plan, write_full_rows  # noqa: E402  (the path comes first)
from msgspec.structs import replace  # noqa: E402
from planning_factory import machine  # noqa: E402
from written_page import markdown_table, with_tables  # noqa: E402

from shardwise.launch.engine.launcher import prepare_attempt  # noqa: E402
from shardwise.trainer.runtime.run.state import ReportWriter, run_paths  # noqa: E402
from shardwise.trainer.spec import codec  # noqa: E402
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob  # noqa: E402
from shardwise.trainer.spec.optimizers import Optimizer  # noqa: E402
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision  # noqa: E402

DOCUMENT = ROOT / "docs" / "techniques.md"
MIB = 2**20
NUM_STEPS = 3  # the last is profiled
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}
_PAGED = (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT)  # a CPU pages nothing
_FULL = {"checkpointing": Checkpointing.FULL}
_FEW = {"checkpointing": Checkpointing.FULL, "micro_batch": 1}  # so that states and gradients dominate


class Measured(NamedTuple):
    """The figures of one technique."""

    name: str
    peak_bytes: int
    predicted_bytes: int
    steady_bytes: int
    facts: dict[str, str]


def cases() -> list[GpuCase]:
    """All techniques; the others of a group are compared with its first."""
    galore = {"galore": GaloreJob(rank=64, update_gap=4)}
    return [
        GpuCase("fp32, nothing saved", {}),
        GpuCase("bf16-mixed", {"precision": Precision.BF16_MIXED}),
        GpuCase("fp16-mixed", {"precision": Precision.FP16_MIXED}),
        GpuCase("bf16", {"precision": Precision.BF16}),
        GpuCase("checkpointing full", _FULL),
        GpuCase("checkpointing selective", {"checkpointing": Checkpointing.SELECTIVE}),
        GpuCase("checkpointing every_n, n 2", {"checkpointing": Checkpointing.EVERY_N, "checkpoint_every_n": 2}),
        GpuCase("checkpointing attention", {"checkpointing": Checkpointing.ATTENTION}),
        GpuCase("loss eager", {"loss": LossHead.EAGER}),
        GpuCase("loss fused", {"loss": LossHead.FUSED}),
        GpuCase("accumulation, 2 x 1", {"micro_batch": 1, "accumulation": 2}),
        GpuCase("one row, recomputed", _FEW),
        *(
            GpuCase(f"... {optimizer}", {"optimizer": optimizer, **_FEW})
            for optimizer in Optimizer
            if optimizer not in (Optimizer.ADAMW_FUSED, Optimizer.DEEPSPEED_CPU_ADAM, *_PAGED)
        ),
        GpuCase("... optimizer_in_backward", {"optimizer_in_backward": True, **_FEW}),
        GpuCase("... galore, rank 64", {"method": Method.GALORE, "optimizer": Optimizer.ADAMW, **_FEW}, train=galore),
        GpuCase(
            "... galore, layer-wise",
            {"method": Method.GALORE, "optimizer": Optimizer.ADAMW, **_FEW},
            train={"galore": GaloreJob(rank=64, update_gap=4, layerwise=True)},
        ),
        GpuCase("... lora, rank 16", {"method": Method.LORA, **_FEW}, train={"lora": LoraJob(rank=16)}),
        GpuCase("... lora with dora", {"method": Method.LORA, **_FEW}, train={"lora": LoraJob(rank=16, dora=True)}),
        GpuCase("... qlora, rank 16", {"method": Method.QLORA, **_FEW}, train={"lora": LoraJob(rank=16)}),
    ]


def measure(case: GpuCase, folder: Path) -> Measured:
    """Trains a case in this process."""
    from accelerate.state import AcceleratorState, GradientState

    from shardwise.trainer.runtime.loop.course import train
    from shardwise.trainer.runtime.run.state import RunState

    settings = {
        "precision": Precision.FP32,
        "optimizer": Optimizer.ADAMW_FUSED,
        "loss_chunk_tokens": 256,
        "micro_batch": 2,
    }
    plan = gpu_plan(
        case._replace(settings={**settings, **case.settings}), folder / "rows", machine("1xCPU"), config=MODEL
    )
    plan = replace(plan, schedule=replace(plan.schedule, num_steps=NUM_STEPS))
    run_dir = folder / re.sub(r"\W+", "-", case.name)
    run_dir.mkdir()
    codec.write(run_dir / "plan.json", plan)
    attempt_dir = prepare_attempt(plan, plan.chosen, run_dir=run_dir, resume=False)
    state, paths = RunState(), run_paths(attempt_dir / "plan.json", started_at=datetime.now(UTC))
    train(plan, paths, ReportWriter(paths, rank=0), state, lambda: False)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
    assert state.memory.peak_allocated_bytes is not None and state.memory.steady_allocated_bytes is not None
    return Measured(
        name=case.name,
        peak_bytes=state.memory.peak_allocated_bytes,
        predicted_bytes=plan.chosen.memory.peak_allocated_bytes,
        steady_bytes=state.memory.steady_allocated_bytes,
        facts=state.verified.facts if state.verified else {},
    )


def table_of(rows: list[Measured]) -> str:
    """Each row relative to the last one above it whose name does not begin with dots."""
    lines = []
    plain = base = rows[0]
    for row in rows:
        if row.name == "one row, recomputed":
            base = row
        elif not row.name.startswith("..."):
            base = plain
        lines.append([
            row.name,
            f"{row.peak_bytes / MIB:.1f} MiB",
            f"{row.peak_bytes / base.peak_bytes:.0%}",
            f"{row.predicted_bytes / MIB:.1f} MiB",
            f"{row.peak_bytes / row.predicted_bytes - 1:+.1%}".replace("-0.0%", "+0.0%"),
            f"{row.steady_bytes / MIB:.1f} MiB",
        ])  # fmt: skip
    return markdown_table(("technique", "peak", "of the plain one", "predicted", "difference", "between steps"), lines)


def main() -> int:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args()
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # only here: with it a group of ranks does not use DeepSpeed
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory() as name:
        write_full_rows(Path(name) / "rows")
        for case in cases():
            if options.only in case.name:
                rows.append(measure(case, Path(name)))
                print(table_of(rows).splitlines()[-1], flush=True)
    table = table_of(rows)
    if options.write:
        from shardwise.trainer.runtime.run.state import installed_versions

        found = {"versions": installed_versions(), "model": MODEL, "rows": [row._asdict() for row in rows]}
        path = ROOT / "benchmarks" / "results" / f"techniques-{datetime.now(UTC):%Y-%m-%d}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
        document = with_tables(DOCUMENT.read_text(encoding="utf-8"), {"measured": table})
        DOCUMENT.write_text(document, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
