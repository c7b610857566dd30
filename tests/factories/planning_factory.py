"""Values for the tests of the planner: each factory names only what its test is about."""

from typing import Any

import msgspec
from msgspec.structs import replace

from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.planner import Extent, PlanOrder, make_plan, with_fp8_gain
from shardwise.trainer.planning.schedule import make_schedule
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.hardware import Hardware, Host
from shardwise.trainer.spec.job.sections import Allowance, DataJob, Job, Limits, ModelJob, Pin, TrainJob
from shardwise.trainer.spec.job.sources import DataSource
from shardwise.trainer.spec.messages.extension import Extension
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import BlockTimes, Calibration, Candidate, Fp8Gain, Plan, TrialResult
from shardwise.trainer.spec.strategy import Fp8Recipe, Method
from shardwise.trainer.spec.units import GIB

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_3_1B: dict[str, Any] = {
    **LLAMA_3_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_3_70B: dict[str, Any] = {
    **LLAMA_3_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 6, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS = {"tiny": TINY, "1b": LLAMA_3_1B, "8b": LLAMA_3_8B, "70b": LLAMA_3_70B}
_plans: dict[bytes, Plan] = {}  # by all that they follow from


def machine(
    spec: str, *, ram_bytes: int | None = 1024 * GIB, vram_bytes: int | None = None, libraries: tuple[str, ...] = (),
    cpu_flags: tuple[str, ...] = ("avx2",),
) -> Hardware:  # fmt: skip
    # All of it for a run, as in a Slurm job.
    names = ("ram_bytes", "ram_available_bytes", "usable_ram_bytes", "pinned_limit_bytes")
    ram: dict[str, Any] = dict.fromkeys(names, ram_bytes)
    host = Host(cpu_name="Test CPU", num_cores=4, cpu_flags=cpu_flags, **ram)
    hardware = replace(hardware_from_spec(spec, local_host=lambda: host), host=host)
    return replace(hardware, vram_cap_bytes=vram_bytes, libraries=dict.fromkeys(libraries, "1.0"))


def shape_of(model: str) -> ModelShape:
    return read_model_shape(CONFIGS[model])


def job_of(
    *, allow: tuple[Allowance, ...] = (Allowance.OFFLOAD_CPU,), from_scratch: bool = False, hours: float | None = 1e6,
    cost: float | None = None, host_ram: int | None = None, price: float | None = None,
    pin: dict[str, Any] | None = None, **train: Any,
) -> Job:  # fmt: skip
    """A job without a deadline unless the test is about one."""
    model = ModelJob(config="model") if from_scratch else ModelJob(name="model")
    return Job(
        model=model, data=DataJob(train=(DataSource(source="data"),)), train=TrainJob(**train), allow=allow,
        limits=Limits(hours=hours, cost=cost, host_ram=host_ram), pin=Pin(**(pin or {})), price_per_gpu_hour=price,
    )  # fmt: skip


def data_of(*, num_rows: int = 10_000, seq_len: int = 2048, num_eval_rows: int = 100, **facts: Any) -> DataProfile:
    return DataProfile(
        **{
            "source": "prepared", "num_rows": num_rows, "num_tokens": num_rows * seq_len, "longest_row": seq_len,
            "is_packed": True, "fingerprint": "0", "vocab_size": 1000, "num_eval_rows": num_eval_rows,
            "num_eval_tokens": num_eval_rows * seq_len, **facts,
        }
    )  # fmt: skip


def plan_of(
    model: str | dict[str, Any], spec: str | Hardware, *, job: Job | None = None, data: DataProfile | None = None,
    calibration: Calibration | None = None, trials: tuple[TrialResult, ...] = (), fp8_gain: Fp8Gain | None = None,
    extension: Extension | None = None, transformers: str = "5.17.0", extent: Extent = Extent.WHOLE,
    beats: PlanOrder | None = None, **job_facts: Any,
) -> Plan:  # fmt: skip
    """The plan of a model on a machine, with everything else as it usually is; made once in a session."""
    fields = CONFIGS[model] if isinstance(model, str) else model
    if job is None:
        job = job_of(**({"seq_len": 512, "tokens_per_step": 8192} if model == "tiny" else {}) | job_facts)
    hardware = machine(spec) if isinstance(spec, str) else spec
    facts: dict[str, Any] = {"hardware": hardware, "model_config": fields, "calibration": calibration or Calibration()}
    facts |= {"data": data or data_of(seq_len=job.train.seq_len), "trials": trials, "extension": extension}
    facts |= {"versions": {"shardwise": "0", "transformers": transformers}}
    facts |= {"fp8_gain": fp8_gain, "extent": extent, "beats": beats}
    key = msgspec.msgpack.encode((job, facts))
    if key not in _plans:
        paths: dict[str, Any] = {"model_path": None, "tokenizer_path": None}
        _plans[key] = make_plan(job, name="test", shape=read_model_shape(fields), **paths, **facts)
    return _plans[key]


def trial_of(candidate: Candidate, step_s: float | None, **facts: Any) -> TrialResult:
    strategy, micro_batch = candidate.strategy.name, candidate.micro_batch
    return TrialResult(
        **{"strategy": strategy, "micro_batch": micro_batch, "step_s": step_s, "peak_allocated_bytes": None, **facts}
    )


def note_of(plan: Plan, words: str) -> str:
    (note,) = (note for note in plan.notes if words in note)
    return note


def context_for(
    model: str, spec: str | Hardware, *, method: Method = Method.FULL, job: Job | None = None,
    shape: ModelShape | None = None, fp8_gain: Fp8Gain | None = None, **job_facts: Any,
) -> PlanningContext:  # fmt: skip
    hardware = machine(spec) if isinstance(spec, str) else spec
    job = job or job_of(**({"seq_len": 512, "tokens_per_step": 8192} if model == "tiny" else {}) | job_facts)
    shape = shape or shape_of(model)
    context = PlanningContext(
        job=job, hardware=hardware, device=device_of(hardware), shape=shape,
        schedule=make_schedule(job, data_of(), shape, method=method), method=method,
    )  # fmt: skip
    return with_fp8_gain(context, fp8_gain)


def fp8_gain_of(
    speedup: float, recipe: Fp8Recipe = Fp8Recipe.TORCHAO_TENSORWISE, library: str = "torchao 0.18.0"
) -> Fp8Gain:
    """A timing that found blocks in FP8 so many times as fast as in bf16."""
    is_compiled = recipe is Fp8Recipe.TORCHAO_TENSORWISE
    # Products of 2e12 FLOPs in what bf16 needs for them and half as much for all else of a block.
    bf16_s = 4e-3
    times = BlockTimes(count=32, flops=2e12, bf16_s=bf16_s, plain_s=bf16_s, fp8_s=bf16_s / speedup)
    return Fp8Gain(recipe=recipe, tokens=4096, library=library, compile=is_compiled, blocks=(times,))
