"""Settings beside the strategy that are incompatible with each other, with the strategy or with the hardware.

Attention, checkpointing, loss head, torch.compile, activation offload, updates inside the backward pass, FP8 recipes.
A combination that settles none of them breaks none of these (tested), so the planner asks them only where a job pins
one, or where it has chosen one.
"""

from shardwise.trainer.planning.rules.combination import Combination, Incompatibility, Reach
from shardwise.trainer.spec.strategy import (
    Attention,
    Checkpointing,
    Fp8Recipe,
    LossHead,
    Method,
    Precision,
)

BLACKWELL_RECIPES = (Fp8Recipe.MXFP8, Fp8Recipe.NVFP4)  # scales of 32 and 16 elements, which its units multiply by
TORCHAO_RECIPES = (Fp8Recipe.TORCHAO_TENSORWISE, Fp8Recipe.TORCHAO_ROWWISE)
RECIPE_CAPABILITY: dict[Fp8Recipe, tuple[int, int]] = {
    Fp8Recipe.BLOCK: (9, 0),
    Fp8Recipe.TORCHAO_ROWWISE: (9, 0),
    **dict.fromkeys(BLACKWELL_RECIPES, (10, 0)),
}


def _has_tiles(c: Combination) -> bool:
    """True if any linear layer of a block divides into tiles; the others stay in 16 bit."""
    return any(linear.num_inputs % c.tile == 0 and linear.num_outputs % c.tile == 0 for linear in c.shape.linears)


def _is_too_old(c: Combination) -> bool:
    return c.fp8_recipe is not None and c.capability_below(RECIPE_CAPABILITY[c.fp8_recipe])


SETTINGS: tuple[Incompatibility, ...] = (
    # Attention.
    Incompatibility(
        name="flash_needs_turing",
        is_broken=lambda c: c.attention is Attention.FLASH and (c.is_cpu or c.capability_below((7, 5))),
        reason="attention: flash needs a GPU of compute capability 7.5; {capability}",
        instead="sdpa",
        evidence="flash-attn 2 does not support Turing, as 1 did (its README, requirements)",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="flash_needs_ampere",
        is_broken=lambda c: c.attention is Attention.FLASH and c.capability_below((8, 0)),
        reason="attention: flash needs a GPU of compute capability 8.0; {capability}",
        instead="sdpa",
        evidence="flash-attn 2.8, README: Ampere, Ada or Hopper",
    ),
    Incompatibility(
        name="flash_needs_16_bit",
        is_broken=lambda c: c.attention is Attention.FLASH and c.strategy.precision is Precision.FP32,
        reason="attention: flash computes in 16 bit and precision: fp32 does not",
        instead="sdpa",
        evidence="flash-attn 2.8: 'FlashAttention only support fp16 and bf16 data type'",
        reach=Reach.ALL,
    ),
    # Updates inside the backward pass.
    Incompatibility(
        name="backward_update_adds_nothing_up",
        is_broken=lambda c: c.backward_update is not None and (c.accumulation or 1) > 1,
        reason="{backward_update} cannot accumulate gradients and needs grad_accum 1, not {accumulation}",
        instead="a rank's whole share as one micro batch",
        evidence="a gradient is used and freed at once; a second micro batch would be a second update",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="deepspeed_makes_the_update",
        is_broken=lambda c: c.optimizer_in_backward and c.strategy.sharding.uses_deepspeed,
        reason="optimizer_in_backward does not work under {sharding}: DeepSpeed makes the update",
        instead="sharding: none",
        evidence="DeepSpeed 0.19.8, stage_1_and_2.py and stage3.py: gradients are reduced and stepped by the engine",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="backward_update_needs_reduced_gradients",
        is_broken=lambda c: c.backward_update is not None and not c.strategy.sharding.facts.updates_in_backward,
        reason="{backward_update} does not work under {sharding}: a hook would update before gradients are reduced",
        instead="sharding: none or fsdp",
        evidence="torch 2.13: DDP reduces a bucket after the hooks of its weights; FSDP2 calls them on reduced shards",
    ),
    Incompatibility(
        name="backward_update_is_of_whole_weights",
        is_broken=lambda c: c.optimizer_in_backward and c.method is not Method.FULL,
        reason="optimizer_in_backward saves gradients of whole weights; method: {method} has none",
        instead="train.galore.layerwise under galore; no such setting under lora and qlora",
        evidence="adapters of rank 16 are under 1 % of the weights, and so are their gradients (arXiv:2106.09685)",
        reach=Reach.PLANNER,
    ),
    Incompatibility(
        name="backward_update_meets_no_scaler",
        is_broken=lambda c: c.backward_update is not None and c.strategy.precision is Precision.FP16_MIXED,
        reason="{backward_update} updates before all gradients can be checked for an fp16 overflow",
        instead="bf16-mixed, bf16 or fp32",
        evidence="the loss scale depends on a check of all gradients (arXiv:1710.03740, 3.2)",
    ),
    # Loss heads.
    Incompatibility(
        name="fused_linear_needs_cuda",
        is_broken=lambda c: c.loss is LossHead.FUSED_LINEAR and c.is_cpu,
        reason="loss: fused_linear is Liger's Triton kernel and needs a GPU; {capability}",
        instead="chunked",
        evidence="liger-kernel is written in Triton, which has no CPU target",
    ),
    Incompatibility(
        name="fused_linear_needs_liger",
        is_broken=lambda c: c.loss is LossHead.FUSED_LINEAR and c.lacks("liger-kernel"),
        reason="loss: fused_linear needs liger-kernel, which is not installed",
        instead="chunked, or {install[liger]}",
        evidence="no other dependency has the kernel",
    ),
    # FP8 recipes.
    Incompatibility(
        name="recipe_needs_blackwell",
        is_broken=lambda c: c.fp8_recipe in BLACKWELL_RECIPES and _is_too_old(c),
        reason="fp8_recipe: {recipe} needs compute capability 10.0; {capability}",
        instead="current",
        evidence="Transformer Engine 2, support matrix: MXFP8 and NVFP4 need Blackwell's tensor cores",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="block_recipe_needs_hopper",
        is_broken=lambda c: c.fp8_recipe is Fp8Recipe.BLOCK and _is_too_old(c),
        reason="fp8_recipe: {recipe} needs compute capability 9.0; {capability}",
        instead="current",
        evidence="Transformer Engine 2, support matrix: scales of blocks of 128 from Hopper on",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="rowwise_recipe_needs_hopper",
        is_broken=lambda c: c.fp8_recipe is Fp8Recipe.TORCHAO_ROWWISE and _is_too_old(c),
        reason="fp8_recipe: {recipe} needs compute capability 9.0; {capability}",
        instead="torchao_tensorwise",
        evidence="torchao, float8 README: rowwise scales are measured only on H100 and newer",
    ),
    Incompatibility(
        name="delayed_meets_no_recomputation",
        is_broken=lambda c: c.fp8_recipe is Fp8Recipe.DELAYED and c.checkpointing not in (None, Checkpointing.NONE),
        reason="fp8_recipe: delayed uses scales of earlier forwards, and a recomputed block would read newer ones",
        instead="current, or checkpointing: none",
        evidence="Transformer Engine 2, DelayedScaling: a forward writes the history that scales are read from",
    ),
    Incompatibility(
        name="fp8_needs_tiles",
        is_broken=lambda c: c.fp8_recipe is not None and not _has_tiles(c),
        reason="{precision} splits matrices into tiles, and no linear layer has both dimensions a multiple of {tile}",
        instead="bf16-mixed",
        evidence="cuBLASLt: FP8 products need dimensions in multiples of 16; recipes by block need 32 or 128",
    ),
    Incompatibility(
        name="recipe_needs_torchao",
        is_broken=lambda c: c.fp8_recipe in TORCHAO_RECIPES and c.lacks("torchao"),
        reason="fp8_recipe: {recipe} needs torchao, which is not installed",
        instead="current with transformer-engine, or {install[torchao]}",
        evidence="its linear layer is torchao's",
    ),
    Incompatibility(
        name="recipe_needs_transformer_engine",
        is_broken=lambda c: (
            c.fp8_recipe is not None and c.fp8_recipe not in TORCHAO_RECIPES and c.lacks("transformer-engine")
        ),
        reason="fp8_recipe: {recipe} needs transformer-engine, which is not installed",
        instead="torchao_tensorwise, or {install[fp8]}, a build that needs nvcc",
        evidence="its linear layer and its scales are Transformer Engine's",
    ),
    # Compilation.
    Incompatibility(
        name="compiled_blocks_hold_no_gathering_hooks",
        is_broken=lambda c: c.compile and c.strategy.sharding.facts.deepspeed_stage == 3,
        reason="compile traces whole blocks, and under {sharding} hooks inside them gather each module's weights",
        instead="fsdp or zero2",
        evidence="deepspeed 0.19.8, torch 2.13: 'Dynamo recompile limit exceeded' in the first forward of two ranks",
    ),
    # Activations.
    Incompatibility(
        name="selective_keeps_on_the_device",
        is_broken=lambda c: c.activation_offload and c.checkpointing is Checkpointing.SELECTIVE,
        reason="activation_offload moves tensors saved by autograd, but checkpointing: selective has its own cache",
        instead="checkpointing: full or none",
        evidence="torch 2.13, create_selective_checkpoint_contexts caches outputs past autograd's saved-tensor hooks",
    ),
    Incompatibility(
        name="activations_are_on_the_host",
        is_broken=lambda c: c.activation_offload and c.is_cpu,
        reason="activation_offload: activations are in host RAM already, the device is the CPU",
        instead="activation_offload: false",
        evidence="a copy from host RAM to host RAM frees nothing",
        reach=Reach.PLANNER,
    ),
)
