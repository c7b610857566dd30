"""Exports the model of a run from one of its checkpoints, of any engine, on the CPU and in one process.

    1  the model of the checkpoint is built, and its logits are computed
    2  it is merged or rounded, if requested, and its logits are computed again
    3  the folder is written next to OUT, and the model is freed
    4  the folder is loaded by plain transformers (and PEFT, or onnxruntime), and its logits are compared

Only then is the folder called OUT. At no time is there more than one model in memory (`trainer.runtime.export.check`).
The default checkpoint is the one that a run itself exports at its end: the last, or the best of a job that stops early.
"""

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from shardwise.trainer.runtime.checkpoint import (
    CheckpointFolder,
    find_checkpoint,
    folder_name,
    import_weights,
    read_weights,
)
from shardwise.trainer.runtime.checkpoint.folders import steps_in, verified
from shardwise.trainer.runtime.export.check import (
    ROUNDED,
    SAME,
    check_logits,
    logits_of,
    prompt_ids,
    reloaded_adapter_logits,
    reloaded_logits,
)
from shardwise.trainer.runtime.export.folder import (
    add_tokenizer,
    merge_adapters,
    round_weights,
    save_adapters,
    save_model,
    staged,
    write_card,
)
from shardwise.trainer.runtime.export.model_card import Export
from shardwise.trainer.runtime.models.build import build_model, model_from_config
from shardwise.trainer.runtime.models.methods import base_type
from shardwise.trainer.runtime.models.model_code import as_its_user, write_model_code
from shardwise.trainer.runtime.models.outer import is_part, outer_of
from shardwise.trainer.runtime.run.process import run_request_and_exit
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import ExportFormat, ExportRequest, GgufType, Lines, WeightType
from shardwise.trainer.spec.model.stored import weight_format
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Evaluation, Report
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision

DTYPES = {WeightType.FP32: torch.float32, WeightType.BF16: torch.bfloat16, WeightType.FP16: torch.float16}
_NAMES = {dtype: str(name) for name, dtype in DTYPES.items()}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HELD_AS = {
    torch.float32: Precision.FP32,
    torch.bfloat16: Precision.BF16_MIXED,
    torch.float16: Precision.FP16_MIXED,
}  # the precision whose frozen base is of a type


class Done(NamedTuple):
    """Result of an export, with notes for the user."""

    checkpoint: CheckpointFolder
    checks: tuple[str, ...]
    notes: tuple[str, ...]


class _Written(NamedTuple):
    """A model that lies in a folder and is no longer in memory."""

    logits: Tensor | None  # of the written model; None where nothing is compared
    dtype: torch.dtype
    checks: tuple[str, ...]


def export_run(request: ExportRequest) -> Done:
    """Exports a checkpoint of a run.

    InputError if there is none, or the request does not fit the run; EnvironmentFaultError if a
    library is missing, or the written model does not give the logits of the trained one.
    """
    run_dir, out = Path(request.run_dir), Path(request.out)
    plan = read_plan(run_dir)
    _check_request(plan, request)
    checkpoint, notes = checkpoint_of(run_dir, plan, request.checkpoint)
    export = Export(
        plan=plan,
        step=checkpoint.step,
        evaluation=evaluation_of(checkpoint),
        report=codec.read(run_dir / "report.json", Report) if (run_dir / "report.json").is_file() else None,
    )
    with staged(out) as folder:
        if request.format is ExportFormat.ONNX:
            export, more = _write_onnx(export, checkpoint, folder, request)
        elif request.format is ExportFormat.GGUF:
            export, more = _write_gguf(export, checkpoint, folder, request)
        elif plan.chosen.method.freezes_base and not request.merge:
            export, more = _write_adapters(export, checkpoint, folder, request)
        else:
            export, more = _write_whole(export, checkpoint, folder, request)
        write_card(export, folder)
    return Done(checkpoint, export.checks, (*notes, *more))


def _check_request(plan: Plan, request: ExportRequest) -> None:
    """InputError for what this run cannot be exported as."""
    freezes = plan.chosen.method.freezes_base
    if request.format is ExportFormat.GGUF:
        _check_gguf(plan, request)
    elif request.quant is not None:
        raise InputError("--quant: has an effect only with --format gguf; add that, or remove it")
    if request.merge and not freezes:
        raise InputError(
            f"--merge: {plan.chosen.method} trains all weights; there are no adapters to merge: remove --merge"
        )
    if request.format is ExportFormat.ONNX and freezes and not request.merge:
        raise InputError(
            f"--format onnx: {plan.chosen.method} trained adapters, and a graph holds one whole model; add --merge"
        )
    if request.format is ExportFormat.ONNX and request.dtype is WeightType.BF16:
        raise InputError("--format onnx: onnxruntime has no bf16 kernels for most operators; use --dtype fp32 or fp16")
    if request.dtype is not None and freezes and not request.merge:
        raise InputError(
            "--dtype: adapters are written in the type they were trained in; add --merge, or remove --dtype"
        )


def _check_gguf(plan: Plan, request: ExportRequest) -> None:
    from shardwise.trainer.runtime.export.gguf import check_gguf_request  # an extra

    if request.dtype is not None:
        raise InputError("--dtype: the type of the weights in a GGUF file is --quant f16, q8_0 or q4_0")
    check_gguf_request(plan.model_config)


def _write_adapters(
    export: Export, checkpoint: CheckpointFolder, folder: Path, request: ExportRequest
) -> tuple[Export, list[str]]:
    """PEFT's folder, checked on its base where that can be loaded."""
    plan = export.plan
    ids, expected = prompt_ids(plan.model_shape.vocab_size), None
    weights = read_weights(checkpoint)
    fits = not is_part(plan) or outer_of(plan, weights) is not None
    if request.checks and plan.model_path is not None and fits:
        expected = logits_of(_trained(plan_on(plan, DeviceKind.CPU), checkpoint), ids)
    save_adapters(weights, plan, folder, hides_paths=request.hides_paths)
    incident = add_tokenizer(plan, folder)
    notes = [incident] if incident is not None else []
    checks: tuple[str, ...] = ()
    if expected is not None and plan.model_path is not None:
        found = reloaded_adapter_logits(folder, plan_on(plan, DeviceKind.CPU), ids)
        measured = check_logits(expected, found, tolerance=SAME, what=f"{folder.name}: loaded by PEFT")
        checks = (f"loaded again by PEFT: logits within {measured:.2g} of the trained model's ({SAME:g} allowed)",)
    elif request.checks:
        reason = "the base of these adapters was made up and lies in no folder"
        if not fits:
            reason = "these adapters fit the text part of their base alone, and PEFT loads all of it"
        notes.append(f"not compared: {reason}; --merge exports it whole")
    return export._replace(kind="adapters", checks=checks, adapters=tuple(weights)), notes


def _write_whole(
    export: Export, checkpoint: CheckpointFolder, folder: Path, request: ExportRequest
) -> tuple[Export, list[str]]:
    """A model folder of all weights, merged and rounded as requested."""
    plan = export.plan
    written = _save_whole(plan, checkpoint, folder, request)
    write_model_code(plan.model_code, folder)
    incident = add_tokenizer(plan, folder)
    checks = written.checks
    if written.logits is not None:
        with as_its_user(plan.model_code) as trusts:
            found = reloaded_logits(folder, prompt_ids(plan.model_shape.vocab_size), trust_remote_code=trusts)
        measured = check_logits(written.logits, found, tolerance=SAME, what=f"{folder.name}: loaded by transformers")
        checks += (
            f"loaded again by transformers: logits within {measured:.2g} of what was written ({SAME:g} allowed)",
        )
    kind = "merged" if request.merge else "model"
    export = export._replace(kind=kind, dtype=_NAMES[written.dtype], checks=checks)
    return export, [incident] if incident is not None else []


def _write_onnx(
    export: Export, checkpoint: CheckpointFolder, folder: Path, request: ExportRequest
) -> tuple[Export, list[str]]:
    """A graph with config and tokenizer; the model is written as safetensors first, and read from there."""
    from shardwise.trainer.runtime.export.check import check_onnx_installed, write_graph  # loads the exporter

    check_onnx_installed()
    whole, notes = _write_whole(export, checkpoint, folder, replace(request, dtype=request.dtype or WeightType.FP32))
    measured = write_graph(folder)
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        path.unlink()
    return whole._replace(kind="onnx", checks=(*whole.checks, measured)), notes


def _write_gguf(
    export: Export, checkpoint: CheckpointFolder, folder: Path, request: ExportRequest
) -> tuple[Export, list[str]]:
    """One file of the whole model, adapters merged; it is made from safetensors in fp32, and replaces them."""
    from shardwise.trainer.runtime.export.gguf import write_gguf

    freezes, quant = export.plan.chosen.method.freezes_base, request.quant or GgufType.Q8_0
    whole, notes = _write_whole(export, checkpoint, folder, replace(request, merge=freezes, dtype=WeightType.FP32))
    checks, more = write_gguf(folder, quant, name=export.plan.name, compares=request.checks)
    return whole._replace(kind="gguf", dtype=quant, checks=(*whole.checks, *checks)), [*notes, *more]


def _save_whole(plan: Plan, checkpoint: CheckpointFolder, folder: Path, request: ExportRequest) -> _Written:
    """Writes the weights; the model ends with this function."""
    dtype = DTYPES[request.dtype] if request.dtype is not None else _merged_type(plan) if request.merge else None
    model = _trained(_merging_plan(plan) if request.merge else plan_on(plan, DeviceKind.CPU), checkpoint)
    ids = prompt_ids(plan.model_shape.vocab_size)
    logits = logits_of(model, ids) if request.checks else None
    checks: tuple[str, ...] = ()
    held = next(model.parameters()).dtype
    if dtype is not None and (request.merge or dtype != held):
        if request.merge:
            with torch.device("meta"):
                plain = model_from_config(plan.model_config, dtype=dtype, attention=Attention.EAGER)
            merge_adapters(model, dtype, plain=plain)
        else:
            round_weights(model, dtype)
        if logits is not None:
            changed = logits_of(model, ids)
            doing = "merging" if request.merge else "rounding"
            tolerance = ROUNDED[dtype]
            measured = check_logits(logits, changed, tolerance=tolerance, what=f"{doing} to {_NAMES[dtype]}")
            checks = (f"{doing}: logits within {measured:.2g} of the trained model's ({tolerance:g} allowed)",)
            logits = changed
    save_model(model, folder)
    return _Written(logits, dtype or held, checks)


def _trained(plan: Plan, checkpoint: CheckpointFolder) -> PreTrainedModel:
    """The model of a checkpoint; InputError if its base is missing."""
    if plan.model_path is not None and not Path(plan.model_path).is_dir():
        raise InputError(
            f"{plan.model_path}: the base model is not there any more; put it back, or export the adapters alone "
            "with --no-check"
        )
    model = build_model(plan)
    import_weights(model, checkpoint)
    model.eval()
    return model


def _merging_plan(plan: Plan) -> Plan:
    """The plan with its base as adapters are merged into it: LoRA's as it lies on the disk, QLoRA's in 4 bit."""
    plan = plan_on(plan, DeviceKind.CPU)
    if plan.chosen.method is Method.QLORA or plan.model_path is None:
        return plan
    return plan_on(plan, DeviceKind.CPU, precision=_HELD_AS[_stored_type(Path(plan.model_path))])


def _merged_type(plan: Plan) -> torch.dtype:
    """The base's own type; of a base that was initialized by the run, the type that it was held in."""
    if plan.model_path is None:
        return base_type(plan.chosen.method, plan.chosen.strategy.precision)
    return _stored_type(Path(plan.model_path))


def _stored_type(folder: Path) -> torch.dtype:
    """The type that most weights of a folder are stored in; fp32 for any that is neither fp32 nor 16 bit.

    Of quantised weights it is that of their config.json.
    """
    config = json.loads((folder / "config.json").read_bytes())
    if weight_format(config) is not None:
        named = config.get("dtype") or config.get("torch_dtype")
        return {"float16": torch.float16, "float32": torch.float32}.get(str(named), torch.bfloat16)
    counts: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # no mapping
                part = file.get_slice(key)
                counts[part.get_dtype()] = counts.get(part.get_dtype(), 0) + torch.Size(part.get_shape()).numel()
    return _STORED.get(max(counts, key=lambda each: counts[each]), torch.float32) if counts else torch.float32


def _run(request: ExportRequest) -> Lines:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed to save; it would look for GPUs
    disable_progress_bar()
    done = export_run(request)
    return Lines(lines=(f"{request.out}: exported from {done.checkpoint.path.name}", *done.checks, *done.notes))


def read_plan(run_dir: Path) -> Plan:
    """The plan of what ran last: of the newest attempt, which may be another than the run began with."""
    if not (run_dir / "plan.json").is_file():
        raise InputError(f"{run_dir}: is not a run directory: it has no plan.json")
    numbers = [int(path.parent.name) for path in run_dir.glob("attempts/*/plan.json") if path.parent.name.isdigit()]
    newest = run_dir / "attempts" / str(max(numbers)) / "plan.json" if numbers else run_dir / "plan.json"
    return _with_own_code(codec.read(newest, Plan), run_dir)


def _with_own_code(plan: Plan, run_dir: Path) -> Plan:
    """The plan with its model's code where the run has it now; the folder of a run may have been moved."""
    if plan.model_code is None:
        return plan
    retained = run_dir / "model_code" / Path(plan.model_code.folder).name
    return replace(plan, model_code=replace(plan.model_code, folder=str(retained.absolute())))


def plan_on(plan: Plan, device_kind: DeviceKind, *, precision: Precision | None = None) -> Plan:
    """The same model on one device: no engine, nothing recomputed, compiled or offloaded, torch's own attention.

    `precision` decides the type that a frozen base is held in.
    """
    chosen = plan.chosen
    strategy = replace(
        chosen.strategy,
        sharding=Sharding.NONE,
        offload=Offload.NONE,
        precision=precision or chosen.strategy.precision,
    )
    single = replace(
        chosen,
        strategy=strategy,
        num_ranks=1,
        checkpointing=Checkpointing.NONE,
        checkpoint_every_n=None,
        attention=Attention.EAGER if chosen.attention is Attention.EAGER else Attention.SDPA,
        flash_kernel=None,
        loss=LossHead.EAGER,
        loss_chunk_tokens=None,
        compile=False,
        fused_kernels=False,
        activation_offload=False,
        shard_group=None,
        reduce_every_micro_batch=False,
        bf16_reduction=False,
        embedding_on_host=False,
        prefetch_two_blocks=False,
        fused_adapters=False,
        compiled_head=False,
    )
    return replace(plan, candidates=(single,), device_kind=device_kind)


_STEP = re.compile(r"step-(\d+)")


def checkpoint_of(run_dir: Path, plan: Plan, wanted: str | None) -> tuple[CheckpointFolder, list[str]]:
    """The checkpoint that `last`, `best`, `step-N` or None means, every byte of it verified, and notes on it.

    InputError if there is none.
    """
    root, notes = run_dir / "checkpoints", list[str]()
    last = find_checkpoint(root, on_skip=notes.append)
    if last is None:
        raise InputError(f"{run_dir}: holds no checkpoint to export")
    saved, best = steps_in(root), best_evaluation(last, steps_in(root))
    if wanted is None:
        wanted = "last" if plan.job.eval.early_stop is None or best is None else "best"
    if wanted == "last":
        score = evaluation_of(last)
        if best is not None and best.step != last.step and score is not None and best.loss < score.loss:
            notes.append(
                f"step {best.step} scored better on the held-out rows ({best.loss:.4f}, the last {score.loss:.4f}): "
                "--checkpoint best"
            )
        return last, notes
    step = _step_of(wanted, best)
    if step not in saved:
        known = ", ".join(f"step-{each}" for each in saved)
        raise InputError(f"--checkpoint {wanted}: the run has no checkpoint of step {step}; it has {known}")
    return (last if step == last.step else verified(root / folder_name(step))), notes


def best_evaluation(last: CheckpointFolder, saved: list[int]) -> Evaluation | None:
    """The lowest held-out loss among steps that have a checkpoint; None where no such step was evaluated."""
    scored = [each for each in last.facts.evaluations if each.step in saved]
    return min(scored, key=lambda each: each.loss, default=None)


def evaluation_of(checkpoint: CheckpointFolder) -> Evaluation | None:
    """The score of a checkpoint's own step, as far as it knows."""
    return next((each for each in checkpoint.facts.evaluations if each.step == checkpoint.step), None)


def _step_of(wanted: str, best: Evaluation | None) -> int:
    if wanted == "best":
        if best is None:
            raise InputError("--checkpoint best: no step of this run has both an evaluation and a checkpoint; use last")
        return best.step
    match = _STEP.fullmatch(wanted)
    if match is None:
        raise InputError(f"--checkpoint {wanted}: is none of last, best and step-N")
    return int(match[1])


if __name__ == "__main__":
    run_request_and_exit(ExportRequest, _run)
