"""One anonymous row of a finished run, for the ledger of predictions (docs/ledger.md): an allow-list, and nothing else.

A row has figures, and text of known sets: members of enumerations, cards of the catalogue, model types with a closed
form, names of the table of models, plain versions of known libraries. Everything else of a run directory is left out,
and text outside these sets becomes null, so that no path, name or message of a run can be in a row.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from shardwise.launch.inputs.model_files import find_known_model
from shardwise.launch.show.recorded_run import RecordedRun
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.model.readers import supported_model_types
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import Ending, Figures
from shardwise.trainer.spec.units import GIB

ROW_FORMAT = 1
LIBRARIES = (
    "shardwise", "torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "liger-kernel", "torchao",
    "transformer-engine", "flash-attn",
)  # fmt: skip
_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}((a|b|rc|\.dev|\.post)\d{1,4})?")
_SHAPE = (
    "num_parameters", "hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "is_tied", "num_experts", "experts_per_token", "num_dense_layers", "sliding_window",
)  # fmt: skip
_SETTINGS = (
    "method", "num_ranks", "micro_batch", "accumulation", "seq_len", "checkpointing", "checkpoint_every_n", "attention",
    "loss", "loss_chunk_tokens", "compile", "fused_kernels", "activation_offload", "optimizer_in_backward",
    "fp8_recipe", "tf32", "shard_group", "reduce_every_micro_batch", "bf16_reduction", "embedding_on_host",
    "prefetch_two_blocks", "fused_adapters", "compiled_head",
)  # fmt: skip
_STRATEGY = ("sharding", "offload", "optimizer", "precision")
_MEMORY = ("steady_allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
_SPEED = ("tokens_per_s_per_gpu", "step_s")


def append_row(path: Path, run: RecordedRun) -> None:
    """Appends the row of a run to a file of JSON lines; InputError if the run has no measurement or path no folder."""
    line = msgspec.json.encode(shared_row(run)) + b"\n"
    try:
        with path.open("a+b") as file:
            if file.tell() and not _ends_line(path):
                line = b"\n" + line
            file.write(line)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"--share {path}: {error.strerror}; name a file in a folder that exists") from error
    except OSError as error:
        raise EnvironmentFaultError(f"--share {path}: cannot be written: {error.strerror}") from error


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() == b"\n"


def shared_row(run: RecordedRun) -> dict[str, Any]:
    """The row of a run that finished; InputError for any other."""
    plan, report = run.plan, run.report
    if plan is None or report is None or report.ending is not Ending.FINISHED:
        raise InputError(f"{run.run_dir}: --share needs a run that finished; this one has not")
    predicted, measured = _figures(report.predicted), _figures(report.measured)
    if not set(predicted) & set(measured):
        raise InputError(f"{run.run_dir}: --share needs a measured figure, and this run has none; train more steps")
    ended = datetime.fromtimestamp((run.run_dir / "report.json").stat().st_mtime, UTC)
    return {
        "format": ROW_FORMAT,
        "month": f"{ended:%Y-%m}",
        "hardware": _hardware(plan, report.plan),
        "versions": _versions(report.versions),
        "model": _model(plan),
        "settings": _settings(plan, report.plan),
        "predicted": predicted,
        "measured": measured,
        "longest_row": report.predicts_longest_row,
        "attempts": report.attempts,
    }


def _hardware(plan: Plan, ran: Candidate) -> dict[str, Any]:
    hardware = plan.hardware
    names = {gpu.spec_name for gpu in hardware.gpus}
    card = next(iter(names)) if len(names) == 1 else None
    return {
        "device": "cpu" if plan.device_kind is DeviceKind.CPU else card if card in GPU_SPECS else None,
        "nodes": plan.num_machines,
        "devices_per_node": -(-ran.num_ranks // plan.num_machines),
        "power_limit_w": hardware.gpus[0].power_limit_w if hardware.gpus else None,
    }


def _versions(versions: Mapping[str, str]) -> dict[str, str]:
    """Versions without their local part, which is anybody's text."""
    found = {name: _VERSION.match(versions[name]) for name in LIBRARIES if name in versions}
    return {name: version[0] for name, version in found.items() if version is not None}


def _model(plan: Plan) -> dict[str, Any]:
    shape, source = plan.model_shape, plan.job.model
    known = find_known_model(source.name or source.config or "")
    return {
        "preset": None if known is None else known.name,
        "model_type": shape.model_type if shape.model_type in supported_model_types() else None,
        **{name: getattr(shape, name) for name in _SHAPE},
        "linears": _linears(shape),
    }


def _linears(shape: ModelShape) -> list[tuple[int, int, int]]:
    return [(linear.num_inputs, linear.num_outputs, linear.num_copies) for linear in shape.linears]


def _settings(plan: Plan, ran: Candidate) -> dict[str, Any]:
    adapters = (
        {"lora_rank": plan.job.train.lora.rank, "dora": plan.job.train.lora.dora} if ran.method.freezes_base else {}
    )
    return {
        **{name: getattr(ran.strategy, name) for name in _STRATEGY},
        **{name: getattr(ran, name) for name in _SETTINGS},
        **adapters,
    }


def _figures(figures: Figures) -> dict[str, float]:
    memory = {name: getattr(figures.memory, name) for name in _MEMORY}
    found = {name.replace("_bytes", "_gib"): value / GIB for name, value in memory.items() if value}
    speed = {name: value for name in _SPEED if (value := getattr(figures.speed, name))}
    return {name: round(value, 4) for name, value in (speed | found).items()}
