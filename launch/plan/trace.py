"""Shapes of models without a closed form: a worker traces one block of each kind, and the cache keeps what it found.

A trace holds for a configuration, the way its rows are made, the kind of device, the packages with kernels for some of
its layers, and the versions of the libraries and of the code that was run. All of them are in the name of its file, so
that a file of other values is never read; it takes seconds to make again.
"""

import hashlib
import sys
from functools import cache
from pathlib import Path

import msgspec
from msgspec.structs import replace

from shardwise.launch.plan.dry_run import ask_simulation
from shardwise.launch.probe.installed import installed_version
from shardwise.launch.terminal import Console
from shardwise.trainer import FOLDER as PACKAGE
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind, Hardware
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.messages.worker_requests import TraceRequest
from shardwise.trainer.spec.model.blocks import Mode
from shardwise.trainer.spec.model.shape import DescriptionRequest, ModelShape
from shardwise.trainer.spec.packages import KERNEL_PACKAGES, kernel_packages
from shardwise.trainer.spec.strategy import Attention, Method, Precision

FOLDER = "traces"
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "shardwise")
_CODE = ("trainer/simulation", "trainer/runtime/attention", "trainer/runtime/memory", "trainer/runtime/models",
         "trainer/runtime/data/documents.py", "trainer/runtime/loss.py", "trainer/spec/model")  # fmt: skip


def traced_shape(request: TraceRequest, *, cache: Path, near: ModelShape | None = None) -> ModelShape:
    """The shape of a model with the traces of its blocks, from the cache if it is there; the cache keeps a new one.

    `near` is the same model's for other rows or another card: with all modes of the request it stands for a new trace.
    Raises the ShardwiseError that the worker ended with.
    """
    if near is not None and near.traced is not None:
        modes = tuple(run for run in near.traced.modes if run.mode in request.modes)
        if {run.mode for run in modes} == set(request.modes):
            return replace(near, traced=replace(near.traced, modes=modes))
    path = cache / FOLDER / f"{_key(request)}.json"
    try:
        return codec.decode(path.read_bytes(), ModelShape, origin=str(path))
    except (OSError, InputError):
        pass  # not there, or of a process that was killed: it is made again
    announce(str(request.description.model_config.get("model_type")))
    has_kernels = any(installed_version(name) is not None for name in KERNEL_PACKAGES)
    shape = ask_simulation("--trace", request, ModelShape, sees_gpus=has_kernels and not request.modes)
    if has_kernels and request.modes:  # whether documents stay apart is measured where those kernels run
        rows = traced_shape(replace(request, modes=()), cache=cache)
        shape = replace(
            shape,
            loss_obstacle=rows.loss_obstacle,
            packing_obstacle=rows.packing_obstacle,
            is_packing_measured=rows.is_packing_measured,
        )
    is_packed = request.is_packed and (shape.traced is None or shape.traced.separates_documents)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for same in {path, path.with_stem(_key(replace(request, is_packed=is_packed)))}:
            codec.write(same, shape)
    except OSError as error:
        Console(sys.stderr).line(f"{path}: cannot be written: {error.strerror}")
    return shape


@cache
def announce(model_type: str) -> None:
    """Once in a process: the ways out of a plan that does not fit trace the model with other settings."""
    Console(sys.stderr).line(f"tracing one block of each kind of {model_type}, once (about 8 s) ...")


def trace_request(
    description: DescriptionRequest, job: Job, hardware: Hardware, *, needs_costs: bool = True
) -> TraceRequest:
    """Everything that a plan of this job may run on this machine, for one block of each kind; or the shape alone."""
    gpu = hardware.gpus[0] if hardware.gpus else None
    kind = DeviceKind.CPU if gpu is None else DeviceKind.CUDA
    request = TraceRequest(
        description=description,
        modes=tuple(_modes(job, kind)) if needs_costs else (),
        lora=job.train.lora,
        seq_len=job.train.seq_len,
        is_packed=job.data.packing is not False,
        packages=kernel_packages(hardware.libraries),
        device_kind=kind,
    )
    capability = None if gpu is None else gpu.compute_capability
    return request if capability is None else replace(request, compute_capability=capability)


def _modes(job: Job, kind: DeviceKind) -> list[Mode]:
    """Weights of each method that the job may use, cast by autocast or as an engine does; 4-bit ones on one device."""
    attention = job.pin.attention if job.pin.attention is Attention.EAGER else Attention.SDPA
    is_fp32 = job.pin.precision is Precision.FP32 or kind is DeviceKind.CPU
    ways = [(2, True), (4 if is_fp32 else 2, False)]
    methods = tuple(Method) if job.train.method is None else (job.train.method,)
    return [
        Mode(method=method, compute_bytes=width, is_autocast=is_autocast, attention=attention)
        for method in dict.fromkeys(each if each.freezes_base else Method.FULL for each in methods)
        for width, is_autocast in (ways[:1] if method is Method.QLORA else ways)
    ]


def _key(request: TraceRequest) -> str:
    versions = {name: installed_version(name) for name in _LIBRARIES}
    return hashlib.sha256(msgspec.json.encode([request, versions, _code_digest()], order="sorted")).hexdigest()[:32]


@cache
def _code_digest() -> str:
    """Of the code that a trace runs: a checkout changes without its version."""
    digest = hashlib.sha256()
    for place in _CODE:
        path = PACKAGE / place
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()
