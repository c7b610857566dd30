"""The part of an explanation that says what would run: the strategy, its recipe, its batch, its steps and its data."""

from collections.abc import Iterator

from shardwise.trainer.planning.candidates import configuration_of
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.memory.precision_policy import dims_of, policy_of
from shardwise.trainer.planning.page.content import Section, Sentence
from shardwise.trainer.spec.data.shapes import SHAPES
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.messages.rank_files import saving_choice
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import Optimizer, StateKind
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.strategy import LossHead, Method, Precision
from shardwise.trainer.spec.units import format_bytes, format_count

_CACHE_BYTES = 2  # bf16


def machine_text(hardware: Hardware) -> str:
    """`4 nodes of 8 x H100-SXM5-80GB`, `1 x RTX-4090`, `2 ranks on Intel Xeon` or `2 nodes of 2 ranks on it`."""
    device = device_of(hardware)
    nodes = f"{hardware.num_nodes} nodes of " if hardware.num_nodes > 1 else ""
    if hardware.gpus:
        return f"{nodes}{hardware.num_devices_per_node} x {device.name}"
    ranks = hardware.num_devices_per_node
    return (
        f"{nodes}{ranks} rank{'s' if ranks > 1 else ''} on {device.name}, {format_bytes(device.memory_bytes)} RAM each"
    )


def heading(plan: Plan) -> str:
    """One line: which run, which model, which machine."""
    size = format_count(plan.model_shape.num_parameters)
    what = f"{plan.name}: {plan.chosen.method} training of {plan.model_shape.model_type}, {size} parameters"
    return f"{what}, on {machine_text(plan.hardware)}"


def choice_section(plan: Plan, context: PlanningContext) -> Section:
    """The chosen configuration."""
    chosen = plan.chosen
    sentences = (
        _batch_line(plan),
        policy_line(chosen, context),
        _steps_line(plan),
        _data_line(plan),
        _saving_line(plan),
    )
    return Section(
        title=f"takes {chosen.strategy.name}",
        blocks=tuple(Sentence(text=text) for text in sentences),
    )


def cache_section(plan: Plan) -> Section:
    """The memory of generated text: what a token adds, and the whole context."""
    shape = plan.model_shape
    tokens = shape.max_positions or plan.job.train.seq_len
    whole = kv_cache_bytes(shape, tokens)
    window = ""
    if shape.sliding_window is not None and shape.num_sliding_layers:
        window = (
            f"; {shape.num_sliding_layers} of {shape.num_layers} blocks keep the last {shape.sliding_window:,} tokens"
        )
    text = (
        f"a KV cache in bf16 takes {format_bytes(kv_cache_bytes(shape, 1))} a token, {format_bytes(whole)} for all "
        f"{tokens:,} positions at batch 1{window}"
    )
    return Section(title="generation", blocks=(Sentence(text=text),))


def kv_cache_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Keys and values of `num_tokens` tokens of one sequence in bf16; blocks with a window keep no more than it."""
    per_block = 2 * shape.kv_size * _CACHE_BYTES
    sliding = shape.num_sliding_layers if shape.sliding_window is not None else 0
    within = min(num_tokens, shape.sliding_window) if shape.sliding_window is not None else num_tokens
    return per_block * ((shape.num_layers - sliding) * num_tokens + sliding * within)


def policy_line(chosen: Candidate, context: PlanningContext) -> str:
    """The type of everything, since a figure without its recipe says little."""
    return "; ".join(_policy_parts(chosen, context))


def _policy_parts(chosen: Candidate, context: PlanningContext) -> Iterator[str]:
    policy = policy_of(configuration_of(context, chosen), context.device, dims_of(context.shape))
    row = chosen.strategy
    half = "fp16" if row.precision is Precision.FP16_MIXED else "bf16"
    names = {4: "fp32", 2: half}
    weight, compute, trained = names[policy.weight_bytes], names[policy.compute_bytes], names[policy.trained_bytes]
    frozen = chosen.method.freezes_base
    stored = f"nf4, embeddings, head and norms {weight}" if chosen.method is Method.QLORA else weight
    masters = f" and {trained} masters" if policy.uses_deepspeed and not frozen and weight != trained else ""
    yield (
        f"weights {stored}{' (frozen), adapters ' + trained if frozen else ''}{masters}, computed in "
        f"{'fp8' if row.precision is Precision.FP8 else compute}{', products in tf32' if chosen.tf32 else ''}"
    )
    gradients = compute if policy.uses_deepspeed else trained
    added = f", added up over ranks in {names[policy.reduce_bytes]}" if chosen.num_ranks > 1 else ""
    yield f"gradients {gradients}{added}"
    yield f"{row.optimizer} {_state_text(row.optimizer, trained)}{_PLACES[row.offload]}"
    chunk = f" of {chosen.loss_chunk_tokens} tokens" if chosen.loss_chunk_tokens else ""
    yield f"loss head {chosen.loss}{chunk}, {_LOGITS[chosen.loss]}"
    yield f"attention {chosen.attention}"
    moved = ", what is kept in host RAM" if chosen.activation_offload else ""
    every = f", n = {chosen.checkpoint_every_n}" if chosen.checkpoint_every_n else ""
    yield f"checkpointing {chosen.checkpointing}{every}{moved}"
    if chosen.compile:
        yield "torch.compile"
    if chosen.buckets:
        yield f"buckets of {format_count(chosen.buckets.reduce_elements)} elements"


_PLACES = {
    Offload.NONE: "",
    Offload.OPTIMIZER: " in host RAM",
    Offload.OPTIMIZER_PARAMS: " in host RAM, and the weights too",
    Offload.NVME_OPTIMIZER: " on NVMe",
    Offload.NVME_ALL: " on NVMe, and the weights too",
}
_LOGITS = {
    LossHead.EAGER: "all logits and their fp32 copy",
    LossHead.CHUNKED: "fp32 logits of one slice at a time",
    LossHead.FUSED: "all logits once, their gradient in place",
    LossHead.FUSED_LINEAR: "no logits",
}


def _state_text(optimizer: Optimizer, trained: str) -> str:
    if optimizer.facts.num_moments == 0:
        return "without state"
    if optimizer.facts.is_8bit:
        return "with state in 8 bit"
    return f"with {'factored ' if optimizer.facts.state is StateKind.FACTORED else ''}state in {trained}"


def _batch_line(plan: Plan) -> str:
    chosen = plan.chosen
    ranks = f"{chosen.num_ranks} rank{'s' if chosen.num_ranks > 1 else ''}"
    size = f"{chosen.micro_batch} x {chosen.seq_len} tokens"
    if SHAPES[plan.data.format].rows_per_example == 2:
        size = f"{chosen.micro_batch} pair{'s' if chosen.micro_batch > 1 else ''} of rows of {chosen.seq_len} tokens"
    return (
        f"micro batch {size}, accumulation {chosen.accumulation}, {ranks}: "
        f"{plan.schedule.tokens_per_step:,} tokens a step"
    )


def _steps_line(plan: Plan) -> str:
    schedule = plan.schedule
    length = f" ({schedule.length_source})" if schedule.length_source else ""
    return (
        f"{schedule.num_steps:,} steps{length}, {schedule.warmup_steps:,} of warmup ({schedule.warmup_source}) "
        f"to lr {schedule.lr:g} ({schedule.lr_source})"
    )


def _saving_line(plan: Plan) -> str:
    schedule, num_bytes = plan.schedule, plan.chosen.memory.checkpoint_bytes
    size = f" of {format_bytes(num_bytes)}" if num_bytes else ""
    steps, seconds = schedule.checkpoint_every_steps, schedule.checkpoint_every_s
    every = [f"{steps:,} steps"] if steps else []
    every += [f"{seconds / 60:g} min"] if seconds else []
    often = f"every {' or '.join(every)}" if every else "at the end"
    if schedule.saving_max_share is not None:
        often += f", for at most {schedule.saving_max_share:.0%} of the time"
    choice = saving_choice(plan, plan.chosen)
    how = "in the background" if choice.is_background else "while training waits"
    return f"checkpoints{size} {often}; written {how}: {choice.reason}"


def _data_line(plan: Plan) -> str:
    data = plan.data
    kind = "packed rows" if data.is_packed else "rows, padded to the longest of a batch,"
    heldout = f"; {data.num_eval_rows:,} rows held out" if data.num_eval_rows else "; nothing held out"
    source = "counted" if data.source == "prepared" else "estimated from file sizes"
    what = "data: a stream; its first window has" if data.is_stream else "data:"
    return (
        f"{what} {data.num_rows:,} {kind} of at most {data.longest_row:,} tokens, "
        f"{format_count(data.num_tokens)} tokens ({source}){heldout}"
    )
