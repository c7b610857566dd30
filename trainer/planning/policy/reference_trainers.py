"""Reference trainers: the behaviour of other programs that affects memory and speed, as values.

A reference trainer never changes a formula, only the values that the formulas read; the first row is our own runtime.
The other rows make published measurements of those programs comparable. A trainer without a row is computed as ours.

Values are from the program's source (named in `source`), or (M) measured on published runs with complete
configurations. Values of one row are about 16-bit training; `PolicyChoices` of a case overrides the ones that differ
between two runs of the same program.
"""

from enum import StrEnum

from msgspec.structs import replace

from shardwise.trainer.planning.configuration import SHARDWISE, Configuration
from shardwise.trainer.spec.strategy import LossHead, Quant
from shardwise.trainer.spec.value import Value


class AdapterInputs(StrEnum):
    """The inputs that the two matrices of an adapter save for the backward."""

    AUTOCAST = "autocast"  # a copy in the computing type for each adapted layer
    FP32 = "fp32"  # an fp32 copy for each: fp32 adapters on 16-bit activations, without autocast
    SHARED = "shared"  # the tensor that the frozen layer reads as well
    FUSED = "fused"  # one copy fewer, and nothing between the two matrices: fused kernels


class LogitBytes(Value, frozen=True, kw_only=True):
    """Bytes a logit, all logits at once, and the number of gradients of the head's weight alive at that moment."""

    forward: float  # when the forward ends
    backward: float  # in the backward of cross-entropy
    num_head_gradients: int = 0
    is_whole: bool = True  # the gradient of all logits exists at once; never of `fused_linear`


class ReferenceTrainer(Value, frozen=True, kw_only=True):
    """One trainer; every default is the behaviour of our runtime."""

    name: str
    source: str
    logits: dict[LossHead, LogitBytes] = {}  # absent: as `activations` derives it for our runtime
    # Of a checkpointed block in its backward:
    keeps_block_output: bool = False  # reentrant checkpointing: the output that was computed again
    frozen_block_arrays: int = 5  # of hidden states, alive in a frozen block in addition to its saved tensors
    has_fused_kernels: bool = False  # a fused loss comes with fused RMSNorm and rotary kernels
    repeats_kv: bool = False  # keys and values are copied to every query head under `sdpa`
    # Adapters:
    frozen_bytes: int | None = None  # of a frozen weight between steps; None: in the computing type
    adapter_bytes: int | None = None  # None: as the optimizer sees any trained weight
    adapter_inputs: AdapterInputs | None = None  # None: autocast if that runs, else shared
    adapter_inputs_pure_fsdp: AdapterInputs | None = None  # if no mixed precision of FSDP casts them
    fuses_adapters: bool = False  # QLoRA with a fused loss: fused adapters, ignored by FSDP, whole and in 16 bit
    quant: Quant | None = None  # NF4 with scales of this form; None: that of the configuration
    # Sharding:
    uses_fsdp1: bool = False  # flat parameters: no copies around a reduction, nothing gathered at the loss
    splits_tables: bool = True  # embedding, and head with the last norm, are groups of their own
    prefetched_blocks: int = 1  # gathered in backward besides the one at work
    retains_frozen_inputs: bool = False  # frozen blocks keep an input gradient each until the backward ends
    reduce_bytes: int | None = None  # None: as the optimizer sees a weight
    reduces_every_micro_batch: bool = False
    sub_group_elements: int | None = None  # ZeRO-3's sub_group_size; None: as our launcher cuts them
    # Optimizer and loader:
    fuses_adamw: bool = False  # its plain AdamW is PyTorch's fused one, not foreach
    keeps_table_state: bool = False  # 8-bit optimizers keep fp32 state for the embedding
    dequantises_states: bool = False  # 8-bit state: fp32 copies of one tensor's state and weight during its update
    expands_segments: bool = True  # PYTORCH_ALLOC_CONF=expandable_segments:True, as our launcher sets it
    loads_whole_model: bool = False  # the 16-bit model is on each device before it is sharded
    # Speed alone:
    flash_generation: int = 2  # of FlashAttention, under `flash` and `sdpa`
    routed_bytes: int = 12  # through memory for an element of a hidden state, to an expert and back, in a forward
    logit_bytes: dict[LossHead, int] = {}  # through memory; absent: as transformers' loss, or as ours
    wraps_adapters: bool = False  # each matrix of an adapter is a unit of FSDP: gathered and reduced by itself

    def __hash__(self) -> int:
        return hash(self.name)  # a dict of logits has no hash


_IN_LOGITS_TYPE = LogitBytes(forward=4, backward=8)  # logits, log-softmax; their two gradients

_HF_TRAINER = ReferenceTrainer(
    name="hf-trainer",
    source="transformers 4.4x modeling_llama.py (16-bit logits, logits.float(), shifted copy, log-softmax: "
    "2 + 4 + 4 + 4 B), PEFT (fp32 adapters), torch FSDP1, fms-acceleration framework_plugin_bnb.py (double "
    "quantisation), PEFT utils/other.py, fsdp_auto_wrap_policy (a unit of every module without children whose weight "
    "is trained); M: fms-acceleration scripts/benchmarks/refs",
    logits={
        LossHead.EAGER: LogitBytes(forward=14, backward=12),
        LossHead.FUSED: LogitBytes(forward=8, backward=8),
    },
    keeps_block_output=True,
    frozen_block_arrays=4,
    adapter_bytes=4,
    adapter_inputs=AdapterInputs.AUTOCAST,
    adapter_inputs_pure_fsdp=AdapterInputs.FP32,
    quant=Quant.NF4_DQ,
    uses_fsdp1=True,
    prefetched_blocks=0,
    retains_frozen_inputs=True,
    keeps_table_state=True,
    wraps_adapters=True,
    sub_group_elements=10**9,
    expands_segments=False,
)
_FUSED_KERNELS = replace(
    _HF_TRAINER,
    name="hf-trainer+fused-kernels",
    source=_HF_TRAINER.source + "; fms-acceleration framework_plugin_fast_quantized_peft.py (adapters as "
    "FSDP's ignored modules), Liger and Unsloth kernels",
    has_fused_kernels=True,
    fuses_adapters=True,
    wraps_adapters=False,
)
_TRAINERS_SUBCLASSES = tuple(
    replace(_HF_TRAINER, name=name, source="general knowledge: subclasses transformers' Trainer; its values")
    for name in ("trl", "axolotl", "llama-factory")
)
_DEEPSPEED = ReferenceTrainer(
    name="deepspeed",
    source="deepspeed runtime/engine.py, _configure_basic_optimizer: AdamW of a DeepSpeed configuration is FusedAdam; "
    "runtime/zero/config.py: sub_group_size 1e9",
    fuses_adamw=True,
    sub_group_elements=10**9,
    expands_segments=False,
)
_TORCHTITAN = ReferenceTrainer(
    name="torchtitan",
    source="torchtitan: fully_shard on each block, reduce_dtype fp32, cross_entropy(pred.float()), run_train.sh "
    "(expandable segments)",
    logits={LossHead.EAGER: LogitBytes(forward=10, backward=12)},
    frozen_block_arrays=1,
    repeats_kv=True,
    reduce_bytes=4,
    fuses_adamw=True,
)
_TORCHTUNE = replace(
    _TORCHTITAN,
    name="torchtune",
    source="torchtune: 16-bit model and adapters, CEWithChunkedOutputLoss (8 slices of 16-bit logits, one upcast at a "
    "time), torchao NF4Tensor (quantised scales) and 8-bit AdamW; M: README, memory ladder",
    logits={
        LossHead.EAGER: LogitBytes(forward=10, backward=12),
        LossHead.FUSED_LINEAR: LogitBytes(forward=2 + 2.7 / 8, backward=2 + 2.7 / 8, num_head_gradients=2),
    },
    quant=Quant.NF4_DQ,
    splits_tables=False,
    dequantises_states=True,
    expands_segments=False,
)
_KEMPNERFORGE = replace(
    _TORCHTITAN,
    name="kempnerforge",
    source="KempnerForge distributed/parallel.py (reduce_dtype fp32), training/grad.py (no synchronisation between "
    "micro batches), training/loss.py (cross_entropy in the logits' own 16-bit type: 2 + 2 + 2 + 2 B)",
    logits={LossHead.EAGER: _IN_LOGITS_TYPE},
    splits_tables=False,
)
_LITGPT = ReferenceTrainer(
    name="litgpt",
    source="litgpt finetune/lora.py: FSDP1 on Block, logits in slices of 128 tokens that all stay, "
    "chunked_cross_entropy in their 16-bit type, adapters in the model's type",
    logits={LossHead.EAGER: _IN_LOGITS_TYPE, LossHead.CHUNKED: LogitBytes(forward=4, backward=4)},
    frozen_block_arrays=1,
    repeats_kv=True,
    uses_fsdp1=True,
    loads_whole_model=True,
    expands_segments=False,
)
_FSDP_QLORA = replace(
    _HF_TRAINER,
    name="fsdp_qlora",
    source="AnswerDotAI/fsdp_qlora train.py: transformers model and loss, FSDP1 (get_wrapping_policy: PEFT's), "
    "adapters in the model's type, non-reentrant checkpointing, every micro batch reduced unless no_sync is requested",
    keeps_block_output=False,
    adapter_bytes=None,
    adapter_inputs=AdapterInputs.SHARED,
    adapter_inputs_pure_fsdp=None,
    quant=None,
    reduces_every_micro_batch=True,
)
_LLM_FOUNDRY = ReferenceTrainer(
    name="llm-foundry",
    source="Composer's FSDP1 with 16-bit reduction of every micro batch; llm-foundry 0.1 to 0.3: flash-attn 1.0, whose "
    "cross-entropy is in place of the logits",
    logits={LossHead.EAGER: LogitBytes(forward=4, backward=4), LossHead.FUSED: LogitBytes(forward=4, backward=4)},
    uses_fsdp1=True,
    reduces_every_micro_batch=True,
    fuses_adamw=True,
    expands_segments=False,
    flash_generation=1,
    logit_bytes={LossHead.EAGER: 14},
)
# Slices of 2,048 of 151,936 entries: a 16-bit product, its fp32 copy, exponentials, weighted sums; again in backward.
_PRIME_SLICE = 2048 / 151936
_PRIME_RL = ReferenceTrainer(
    name="prime-rl",
    source="prime-rl d8f290e trainer/model.py (fp32 model, also under adapters; fully_shard of each block, tables "
    "with the root if tied; logits.float()), trainer/sft/train.py (torch's cross-entropy, every micro batch reduced in "
    "fp32), .github/workflows/benchmarks.yaml (expandable segments), models/layers/lm_head.py (the head of "
    "trainer/rl/train.py), trainer/optim.py (foreach AdamW)",
    logits={
        # fp32 logits, held until the step ends, and log-softmax; two fp32 gradients of that
        LossHead.EAGER: LogitBytes(forward=8, backward=16),
        LossHead.CHUNKED: LogitBytes(
            forward=14 * _PRIME_SLICE, backward=16 * _PRIME_SLICE, num_head_gradients=1, is_whole=False
        ),
    },
    # Plain torch: bf16 logits, an fp32 copy, log-softmax, its two gradients; in slices maximum, difference,
    # exponential, two sums and a product in the forward, and as many in the backward.
    logit_bytes={LossHead.EAGER: 46, LossHead.CHUNKED: 120},
    routed_bytes=30,  # gathered 4, weighted in fp32 20, scattered and added 6
    frozen_bytes=4,
    adapter_bytes=4,
    adapter_inputs=AdapterInputs.SHARED,
    reduce_bytes=4,
    reduces_every_micro_batch=True,
)
_PRIME_RL_SLICES = replace(
    _PRIME_RL,
    name="prime-rl-2026-06",
    source="prime-rl 46bcf62 models/layers/lm_head.py: slices of 8,192 tokens and 8,192 entries",
    logits={LossHead.EAGER: _PRIME_RL.logits[LossHead.EAGER]},
)
_PEFT = ReferenceTrainer(
    name="peft",
    source="peft b8bf407 method_comparison/MetaMathQA/run.py: a plain loop around a 16-bit model of transformers, fp32 "
    "adapters without autocast",
    logits={LossHead.EAGER: LogitBytes(forward=10, backward=10)},
    adapter_bytes=4,
    adapter_inputs=AdapterInputs.FP32,
)

REFERENCE_TRAINERS: dict[str, ReferenceTrainer] = {
    reference.name: reference
    for reference in (
        ReferenceTrainer(name=SHARDWISE, source="trainer/runtime, agreed with simulated and measured steps"),
        _HF_TRAINER,
        _FUSED_KERNELS,
        *_TRAINERS_SUBCLASSES,
        _DEEPSPEED,
        _TORCHTITAN,
        _TORCHTUNE,
        _KEMPNERFORGE,
        _LITGPT,
        _FSDP_QLORA,
        _LLM_FOUNDRY,
        _PRIME_RL,
        _PRIME_RL_SLICES,
        _PEFT,
    )
}


def reduces_every_micro_batch(configuration: Configuration) -> bool:
    """True if gradients are reduced before the last micro batch, so that no rank holds whole ones."""
    if configuration.reduce_every_micro_batch:
        return True
    chosen = configuration.policy.reduces_every_micro_batch
    return reference_of(configuration.reference).reduces_every_micro_batch if chosen is None else chosen


def reference_of(name: str) -> ReferenceTrainer:
    """The reference trainer of this name; our own if there is none."""
    return REFERENCE_TRAINERS.get(name) or REFERENCE_TRAINERS[SHARDWISE]
