"""Steps that answer what published figures left open, one question each: context, cuBLAS, loss heads, loading.

Each is a process of its own (`prediction_probe_child`), and its row holds what was predicted beside what was found.
The allocator's question is a case run once more, with the segments that PyTorch takes unless it is told otherwise.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from launch.attempt_files import prepare_attempt
from launch.measuring_process import measuring_environment, run_modules
from launch.short_run import short_plan
from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.pieces import Row, Step
from on_gpu.prediction_cases import ALLOCATED, LOADED
from on_gpu.prediction_peaks import plan_stated
from on_gpu.prediction_rows import ALLOCATOR, PROBE, row_of, without_paths
from on_gpu.prediction_runs import expected_s, run_case, with_environment
from trainer.planning.device import device_of
from trainer.planning.memory.events import CUBLAS_WORKSPACE_BYTES_HOPPER
from trainer.spec.errors import ShardwiseError
from trainer.spec.strategy import LossHead

CHILD = "on_gpu.prediction_probe_child"
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 170.0
CONTEXT, LOSS, LOAD = "context", "loss", "load"
WITHOUT_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
TOKENS, VOCABULARIES = 8192, (128256, 64128)
TINY_TOKENS, TINY_VOCABULARIES = 1024, (4096, 2048)
ALL_HEAD: dict[str, Any] = {  # a model whose blocks are next to nothing
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16384,
}


def steps(bench: Bench, _done: Mapping[str, Row]) -> Iterator[Step]:
    """Every probe, then the cases for the allocator."""
    yield Step(f"{PROBE}: {CONTEXT}", partial(_context_row, bench), expected_s=30.0)
    yield Step(f"{PROBE}: {LOSS}", partial(_loss_row, bench), expected_s=90.0)
    for case in LOADED:
        yield Step(f"{PROBE}: {LOAD} {case.name}", partial(_load_row, bench, case), expected_s(bench, case))
    for case in ALLOCATED:
        yield Step(f"{ALLOCATOR}: {case.name}", partial(_allocator_row, bench, case), expected_s(bench, case))


def _context_row(bench: Bench) -> Row:
    gpus = bench.hardware.gpus
    used = gpus[0].memory_bytes - gpus[0].free_bytes if gpus and gpus[0].free_bytes is not None else None
    predicted = {
        "context": device_of(bench.hardware).context_bytes if gpus else None,
        "cublas_handle": CUBLAS_WORKSPACE_BYTES_HOPPER if gpus else None,
        "used_before": used,
    }
    return _ask(bench, {"kind": CONTEXT}) | {"predicted": predicted}


def _loss_row(bench: Bench) -> Row:
    tokens, vocabularies = (TINY_TOKENS, TINY_VOCABULARIES) if bench.is_tiny else (TOKENS, VOCABULARIES)
    request = {"kind": LOSS, "config": ALL_HEAD, "tokens": tokens, "vocabularies": vocabularies}
    asked = {"tokens": tokens, "vocabularies": vocabularies}
    return _ask(bench, request) | asked | {"predicted": _predicted_heads(bench, tokens, vocabularies)}


def _predicted_heads(bench: Bench, tokens: int, vocabularies: tuple[int, ...]) -> dict[str, list[dict[str, int]] | str]:
    """The same peaks as the planner puts them, by loss head."""
    found: dict[str, list[dict[str, int]] | str] = {}
    for head in LossHead:
        try:
            found[head] = [_predicted_peaks(bench, head, tokens, vocab) for vocab in vocabularies]
        except ShardwiseError as error:
            found[head] = " ".join(str(error).split())
    return found


def _predicted_peaks(bench: Bench, head: LossHead, tokens: int, vocab: int) -> dict[str, int]:
    job = {
        "model.name": "llama-3.2-1b",
        "data.format": "tokens",
        "data.eval": "none",
        "train.method": "full",
        "train.seq_len": str(tokens),
        "train.tokens_per_step": str(tokens),
        "train.steps": "6",
        "allow": "[bf16_weights, optimizer_approx]",
        "pin.micro_batch": "1",
        "pin.sharding": "none",
        "pin.precision": "bf16",
        "pin.optimizer": "sgd",
        "pin.checkpointing": "none",
        "pin.attention": "sdpa",
        "pin.loss": str(head),
    }
    config = {**ALL_HEAD, "model_type": "llama", "vocab_size": vocab, "tie_word_embeddings": False}
    folder = bench.work / "stated"
    folder.mkdir(parents=True, exist_ok=True)
    memory = plan_stated(job, bench.hardware, folder, num_rows=32, model_config=config).chosen.memory
    backward = [size for name, size in memory.events.items() if name not in ("load", "forward_end", "optimizer_step")]
    steady = memory.steady_allocated_bytes
    return {"forward": memory.events["forward_end"] - steady, "backward": max(backward) - steady}


def _load_row(bench: Bench, case: Case) -> Row:
    try:
        plan = with_environment(bench, {}).plan_of(case)
    except ShardwiseError as error:
        reason = " ".join(str(error).split())
        return _row(bench, {"case": case.name, "reason": without_paths(reason, bench.work, Path.home())})
    with bench.run_folder() as run_dir:
        short = short_plan(plan, plan.chosen, num_steps=2)
        attempt = prepare_attempt(short, plan.chosen, run_dir=run_dir, resume=False)
        answer = _ask(bench, {"kind": LOAD, "plan": str(attempt / "plan.json")})
    memory = plan.chosen.memory
    predicted = {"load": memory.events["load"], "steady": memory.steady_allocated_bytes}
    return answer | {"case": case.name, "predicted": predicted}


def _allocator_row(bench: Bench, case: Case) -> Row:
    return row_of(run_case(bench, case, kind=ALLOCATOR, environment=WITHOUT_EXPANDABLE))


def _ask(bench: Bench, request: Mapping[str, Any]) -> Row:
    """What the child found, or how far it came and why."""
    folder = bench.work / "probe"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps(request))
    answer = folder / "answer.json"
    has_ended, error = run_modules(
        CHILD,
        [[str(folder / "request.json"), str(answer)]],
        environment=measuring_environment(bench.hardware.gpus[:1], PYTHONPATH=f"{ROOT / 'benchmarks'}:{ROOT}"),
        folder=folder,
        timeout_s=TIMEOUT_S,
    )
    found = json.loads(answer.read_text()) if answer.is_file() else {}
    if not has_ended:
        found["error"] = f"it took more than {TIMEOUT_S:g} s"
    elif error:
        found["error"] = without_paths(error, bench.work, Path.home())
    return _row(bench, found)


def _row(bench: Bench, found: Mapping[str, Any]) -> Row:
    return {"kind": PROBE, "is_rehearsal": bench.is_tiny, "device": bench.device_name, **found}
