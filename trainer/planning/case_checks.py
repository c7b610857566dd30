"""Which prediction cases describe something that cannot run, each with the sentence that says why.

Two tables. `PHYSICAL` holds for all software: what a chip, the arithmetic or the only library that has the feature
rules out. `OURS` holds for our own runtime alone: combinations that other software does offer, so a case with another
`stack` is answered. A combination that is merely pointless (FSDP on one GPU) runs, and is answered as well.
"""

from collections.abc import Callable

from trainer.planning.case_input import TrainInput
from trainer.planning.catalogue import optimizers_of
from trainer.planning.device import Device
from trainer.planning.setting import OUR_STACK, Setting
from trainer.spec.hardware import DeviceKind
from trainer.spec.job_clashes import GALORE_OPTIMIZERS, OFFLOAD_SHARDINGS
from trainer.spec.job_kinds import one_of
from trainer.spec.model_shape import ModelShape, Positions
from trainer.spec.strategy import (
    Attention,
    Checkpointing,
    Fp8Recipe,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Sharding,
)

Check = Callable[[ModelShape, Device, Setting], str | None]

_BF16 = (Precision.BF16_MIXED, Precision.BF16, Precision.FP8)
_BLACKWELL_RECIPES = (Fp8Recipe.MXFP8, Fp8Recipe.NVFP4)  # scales of 32 and 16 elements, which its units multiply by
_FLASH_1 = (7, 5)  # flash-attn 1.x runs on Turing, which 2.x left
_INSIDE_GALORE = (*GALORE_OPTIMIZERS, Optimizer.ADAMW_FUSED, Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT)
_INSIDE_BACKWARD = (Optimizer.LOMO, Optimizer.ADALOMO)


def impossibility(shape: ModelShape, device: Device, setting: Setting) -> str | None:
    """Why this setting cannot run on this device, or None where it can."""
    checks = (*PHYSICAL, *OURS) if setting.stack == OUR_STACK else PHYSICAL
    for check in checks:
        sentence = check(shape, device, setting)
        if sentence is not None:
            return sentence
    return None


def misplaced(train: TrainInput, device: Device) -> str | None:
    """Why a field does not go with the others or with the chip, of those that no `Setting` keeps; None where all do."""
    if train.quant is not None and train.method is not Method.QLORA:
        return f"train.quant is of method: qlora, not of {train.method}"
    if train.fp8_recipe is None:
        return None
    if train.precision is not Precision.FP8:
        return f"train.fp8_recipe is of precision: fp8, not of {train.precision}"
    if train.fp8_recipe in _BLACKWELL_RECIPES and _capability(device) < (10, 0):
        return f"train.fp8_recipe: {train.fp8_recipe} needs compute capability 10.0; {_has(device)}"
    return None


def _capability(device: Device) -> tuple[int, int]:
    """An unknown card is taken to be able to."""
    return device.compute_capability or (99, 0)


def _has(device: Device) -> str:
    if device.kind is DeviceKind.CPU:
        return f"{device.name} is a CPU"
    major, minor = _capability(device)
    return f"{device.name} has {major}.{minor}"


def _fp8(_shape: ModelShape, device: Device, setting: Setting) -> str | None:
    if setting.strategy.precision is not Precision.FP8:
        return None
    if device.kind is DeviceKind.CUDA and _capability(device) >= (8, 9):
        return None
    return f"precision: fp8 needs compute capability 8.9; {_has(device)}"


def _flash(_shape: ModelShape, device: Device, setting: Setting) -> str | None:
    if setting.attention is not Attention.FLASH:
        return None
    if device.kind is DeviceKind.CPU or _capability(device) < _FLASH_1:
        return f"attention: flash needs a GPU of compute capability 7.5; {_has(device)}"
    if setting.strategy.precision is Precision.FP32:
        return "attention: flash computes in 16 bit and precision: fp32 does not; use sdpa"
    return None


def _state_off_device(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    """DeepSpeed alone moves state to NVMe, and parameters only under ZeRO-3."""
    sharding, offload = setting.strategy.sharding, setting.strategy.offload
    if not (offload.uses_nvme or (offload.moves_parameters and sharding.uses_deepspeed)):
        return None
    return None if sharding is Sharding.ZERO3 else f"offload: {offload} needs sharding: zero3, not {sharding}"


def _cpu_adam(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    strategy = setting.strategy
    if strategy.optimizer is not Optimizer.DEEPSPEED_CPU_ADAM:
        return None
    if strategy.offload is Offload.NONE:
        return "optimizer: deepspeed_cpu_adam updates state in host RAM and needs an offload"
    if not strategy.sharding.uses_deepspeed:
        return f"optimizer: deepspeed_cpu_adam needs zero1, zero2 or zero3, not {strategy.sharding}"
    return None


def _galore(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    if setting.method is not Method.GALORE:
        return "layerwise is of method: galore" if setting.galore.layerwise else None
    if setting.strategy.optimizer not in _INSIDE_GALORE:
        return f"inside galore runs {one_of(GALORE_OPTIMIZERS)}, not {setting.strategy.optimizer}"
    return None


def _update_in_backward(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    """An update inside backward leaves no gradients for a second micro batch to add to."""
    if setting.optimizer_in_backward:
        what = "optimizer_in_backward"
    elif setting.strategy.optimizer in _INSIDE_BACKWARD:
        what = f"optimizer: {setting.strategy.optimizer}"
    elif setting.galore.layerwise:
        what = "layerwise"
    else:
        return None
    if setting.accumulation > 1:
        return f"{what} leaves no gradients to add up and needs grad_accum 1, not {setting.accumulation}"
    if setting.optimizer_in_backward and setting.strategy.sharding.uses_deepspeed:
        return f"optimizer_in_backward does not work under {setting.strategy.sharding}: DeepSpeed makes the update"
    return None


def _every_n(shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    num_blocks, is_every_n = setting.checkpoint_every_n, setting.checkpointing is Checkpointing.EVERY_N
    if num_blocks is None:
        return (
            "checkpointing: every_n needs n, the number of blocks from one checkpoint to the next"
            if is_every_n
            else None
        )
    if not is_every_n:
        return f"n is of checkpointing: every_n, not of {setting.checkpointing}"
    return f"n is {num_blocks}, and the model has {shape.num_layers} blocks" if num_blocks > shape.num_layers else None


def _slices(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    if setting.loss_chunk_tokens is None or setting.loss is LossHead.CHUNKED:
        return None
    return f"loss_chunk_tokens is of loss: chunked, not of {setting.loss}"


def _positions(shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    longest = setting.recipe.longest_seq or setting.seq_len
    if shape.positions is not Positions.LEARNED or shape.max_positions is None or longest <= shape.max_positions:
        return None
    return f"a sequence of {longest} tokens is longer than the model's table of {shape.max_positions} positions"


def _longest(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    longest = setting.recipe.longest_seq
    if longest is None or longest >= setting.seq_len:
        return None
    return f"recipe.longest_seq is {longest}, less than train.seq_len {setting.seq_len}"


def _targets(shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    """PEFT passes over a name that no layer has, as long as another name finds one; so may any foreign stack."""
    if not setting.method.freezes_base or setting.lora.targets == ("all-linear",):
        return None
    names = tuple(dict.fromkeys(linear.name for linear in shape.linears))
    unknown = [target for target in setting.lora.targets if target not in names]
    is_foreign = setting.stack != OUR_STACK
    if setting.lora.targets and (not unknown or (is_foreign and len(unknown) < len(setting.lora.targets))):
        return None
    said = repr(unknown[0]) if unknown else "an empty list"
    return f"lora_targets: {said} names no linear layer of this model; it has {', '.join(names)}, or all-linear"


PHYSICAL: tuple[Check, ...] = (
    _fp8,
    _flash,
    _state_off_device,
    _cpu_adam,
    _galore,
    _update_in_backward,
    _every_n,
    _slices,
    _positions,
    _longest,
    _targets,
)


def _our_ranks(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    """Elsewhere a job may leave GPUs of its node idle, or run once on each."""
    if setting.strategy.sharding is not Sharding.NONE or setting.num_ranks == 1:
        return None
    return f"sharding: none would train {setting.num_ranks} different models on {setting.num_ranks} GPUs; use ddp"


def _our_flash(_shape: ModelShape, device: Device, setting: Setting) -> str | None:
    if setting.attention is not Attention.FLASH or _capability(device) >= (8, 0):
        return None
    return f"attention: flash needs a GPU of compute capability 8.0; {_has(device)}"


def _our_galore(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    """GaLore 2 projects what FSDP cuts, and other forms of Adam are Adam inside as well."""
    if setting.method is not Method.GALORE:
        return None
    if setting.strategy.optimizer not in GALORE_OPTIMIZERS:
        return f"inside galore runs {one_of(GALORE_OPTIMIZERS)}, not {setting.strategy.optimizer}"
    if setting.strategy.sharding.shards_optimizer:
        return f"galore projects whole gradients and sharding: {setting.strategy.sharding} cuts them; use none or ddp"
    return None


def _our_offload(_shape: ModelShape, device: Device, setting: Setting) -> str | None:
    sharding, offload = setting.strategy.sharding, setting.strategy.offload
    if offload is Offload.NONE:
        return None
    if sharding not in OFFLOAD_SHARDINGS[offload]:
        return f"offload: {offload} needs sharding: {one_of(OFFLOAD_SHARDINGS[offload])}, not {sharding}"
    if sharding.uses_fsdp and device.kind is DeviceKind.CPU:
        return f"FSDP2's offload to host RAM needs an accelerator; {_has(device)}"
    return None


def _our_optimizer(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    strategy = setting.strategy
    sound = optimizers_of(strategy.sharding, strategy.offload)
    if strategy.optimizer in sound:
        return None
    layout = strategy.sharding if strategy.offload is Offload.NONE else f"{strategy.sharding}+{strategy.offload}"
    return f"optimizer: {strategy.optimizer} does not work under {layout}; it runs {one_of(sound)}"


def _our_bf16(_shape: ModelShape, device: Device, setting: Setting) -> str | None:
    """Other software emulates bf16 on chips without it."""
    if setting.strategy.precision not in _BF16 or device.kind is DeviceKind.CPU or _capability(device) >= (8, 0):
        return None
    return f"precision: {setting.strategy.precision} needs compute capability 8.0; {_has(device)}; use fp16-mixed"


def _our_fp16(_shape: ModelShape, device: Device, setting: Setting) -> str | None:
    if setting.strategy.precision is not Precision.FP16_MIXED:
        return None
    if device.kind is DeviceKind.CUDA and _capability(device) >= (7, 0):
        return None
    return f"precision: fp16-mixed needs compute capability 7.0; {_has(device)}; use fp32"


def _our_hsdp(_shape: ModelShape, device: Device, setting: Setting) -> str | None:
    if setting.strategy.sharding is not Sharding.HSDP or device.num_nodes > 1:
        return None
    return "sharding: hsdp shards inside a node and replicates across nodes; on one node it is fsdp"


def _our_qlora(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    if setting.method is not Method.QLORA or setting.strategy.sharding is not Sharding.ZERO3:
        return None
    return "method: qlora and sharding: zero3 exclude each other: ZeRO-3 cannot cut 4-bit blocks; use fsdp or zero2"


def _our_adapters(_shape: ModelShape, _device: Device, setting: Setting) -> str | None:
    if not setting.method.freezes_base or setting.strategy.optimizer not in (*_INSIDE_BACKWARD, Optimizer.MUON):
        return None
    return f"optimizer: {setting.strategy.optimizer} is made for whole weights; {setting.method} trains small adapters"


OURS: tuple[Check, ...] = (
    _our_ranks,
    _our_flash,
    _our_galore,
    _our_offload,
    _our_optimizer,
    _our_bf16,
    _our_fp16,
    _our_hsdp,
    _our_qlora,
    _our_adapters,
)
