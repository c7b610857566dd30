"""Incompatibilities of a strategy and of other settings with method, ranks and hardware: three tables.

`LAYOUTS` is about the strategy alone; no row of the catalogue breaks it, and it states why a strategy is missing.
`ROWS` rules out rows of the catalogue for a method or on a machine. `SETTINGS` is about attention, checkpointing, loss
head, torch.compile, activation offload, embeddings in host RAM, updates inside the backward pass and the FP8 recipe. An
input that fixes none of these breaks none (tested), so the planner reads it only for the pins of a job and for what it
has chosen.

The first broken row of a table is the reason, so the more fundamental one comes first.
"""

from shardwise.trainer.planning.rules.rule_input import Incompatibility, Reach, RuleInput
from shardwise.trainer.planning.tables.catalogue import LAYOUTS as CATALOGUED
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.fp8 import FP8_RECIPES, Fp8Package, converted_shapes
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Fp8Recipe, LossHead, Method, Precision

BF16 = (Precision.BF16_MIXED, Precision.BF16, Precision.FP8)


def _only_zero3_moves(c: RuleInput) -> bool:
    """NVMe is DeepSpeed's alone, and so is moving parameters where DeepSpeed is the engine."""
    sharding, offload = c.strategy.sharding, c.strategy.offload
    is_bound = offload.uses_nvme or (offload.moves_parameters and sharding.uses_deepspeed)
    return is_bound and sharding.facts.deepspeed_stage != 3


def _is_offloaded(c: RuleInput) -> bool:
    return c.strategy.offload is not Offload.NONE


def _adapts_experts(c: RuleInput) -> bool:
    """True if adapters are put on parameters that are not modules."""
    in_one = any(linear.adapter_rank_factor and not linear.is_linear_module for linear in c.shape.linears)
    return in_one and c.lora.targets == ("all-linear",)


LAYOUTS: tuple[Incompatibility, ...] = (
    Incompatibility(
        name="only_zero3_moves_parameters",
        is_broken=_only_zero3_moves,
        reason="offload: {offload} needs sharding: zero3, not {sharding}",
        instead="zero3",
        evidence="DeepSpeed 0.19.8, zero/config.py: offload_param is of stage 3; no other engine here writes to NVMe",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="offload_needs_an_engine",
        is_broken=lambda c: _is_offloaded(c) and c.strategy.offload not in c.strategy.sharding.facts.offloads,
        reason="offload: {offload} needs sharding: {offload_shardings}, not {sharding}",
        instead="{offload_shardings}",
        evidence="torch, DDP and FSDP2 update weights in place; DeepSpeed offloads the optimizer, FSDP2 all shards",
    ),
    Incompatibility(
        name="offload_has_a_better_layout",
        is_broken=lambda c: c.strategy.layout not in CATALOGUED,
        reason="{layout} needs more device memory than another layout with the same communication",
        instead="zero2 for the optimizer, zero3 or fsdp for parameters too",
        evidence="ZeRO-2 sends a gradient to its owner once, as ZeRO-1 does, and drops it (arXiv:1910.02054, 5.2)",
        reach=Reach.PLANNER,
    ),
    Incompatibility(
        name="cpu_adam_needs_an_offload",
        is_broken=lambda c: c.strategy.optimizer.facts.updates_on_host and not _is_offloaded(c),
        reason="optimizer: deepspeed_cpu_adam updates state in host RAM and needs an offload",
        instead="adamw_fused",
        evidence="DeepSpeed 0.19.8, ops/adam/cpu_adam.py: it asserts that parameters are CPU tensors",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="cpu_adam_is_of_deepspeed",
        is_broken=lambda c: c.strategy.optimizer.facts.updates_on_host and not c.strategy.sharding.uses_deepspeed,
        reason="optimizer: deepspeed_cpu_adam needs zero1, zero2 or zero3, not {sharding}",
        instead="adamw_fused",
        evidence="FSDP2 passes DTensors to its optimizer, which the operator does not support",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="zero_offload_updates_with_cpu_adam",
        is_broken=lambda c: (
            _is_offloaded(c) and c.strategy.sharding.uses_deepspeed and not c.strategy.optimizer.facts.updates_on_host
        ),
        reason="optimizer: {optimizer} does not work under {layout}: state in host RAM is updated there",
        instead="deepspeed_cpu_adam",
        evidence="Accelerate 1.15 silently replaces any other by it (docs/workarounds.md, W5)",
    ),
    Incompatibility(
        name="fsdp_offload_updates_with_adamw",
        is_broken=lambda c: (
            _is_offloaded(c)
            and c.strategy.sharding.uses_fsdp
            and not c.strategy.optimizer.facts.updates_fsdp_shards_on_host
        ),
        reason="optimizer: {optimizer} does not work under {layout}: shards are updated in host RAM",
        instead="adamw_fused",
        evidence="torch's AdamW has a fused CPU kernel; the others of FSDP2 were not tried on shards in host RAM",
    ),
    Incompatibility(
        name="lomo_needs_one_rank",
        is_broken=lambda c: (
            c.strategy.optimizer.facts.updates_in_backward and not c.strategy.sharding.facts.is_one_rank
        ),
        reason="optimizer: {optimizer} does not work under {sharding}: it updates before gradients are reduced",
        instead="sharding: none, or adamw_fused",
        evidence="LOMO, arXiv:2306.09782, algorithm 1: a hook uses and frees each gradient as it comes",
    ),
    Incompatibility(
        name="bitsandbytes_takes_plain_tensors",
        is_broken=lambda c: not c.strategy.optimizer.facts.supports_dtensors and c.strategy.sharding.uses_fsdp,
        reason="optimizer: {optimizer} does not work under {sharding}: its kernels take plain tensors, not DTensors",
        instead="zero2 or zero3, or adamw_8bit",
        evidence="bitsandbytes#89, pytorch/ao#1213; ZeRO's flat partitions are plain tensors; adamw_8bit has shards",
    ),
    Incompatibility(
        name="lamb_needs_whole_tensors",
        is_broken=lambda c: c.strategy.optimizer.facts.needs_whole_tensors and c.strategy.sharding.shards_optimizer,
        reason="optimizer: {optimizer} does not work under {sharding}: its trust ratio needs the norm of a whole layer",
        instead="ddp, or adamw_8bit",
        evidence="LAMB, arXiv:1904.00962, algorithm 2; ZeRO's flat partition does not follow layers",
    ),
    Incompatibility(
        name="matrix_updates_need_whole_matrices",
        is_broken=lambda c: c.strategy.optimizer.facts.needs_whole_matrices and c.strategy.sharding.shards_optimizer,
        reason="optimizer: {optimizer} does not work under {sharding}: its update needs whole matrices",
        instead="ddp, or adamw_fused",
        evidence="Adafactor, arXiv:1804.04235: row and column means; torch.optim.Muon refuses what is not a matrix",
    ),
)


ROWS: tuple[Incompatibility, ...] = (
    Incompatibility(
        name="one_memory_for_both",
        is_broken=lambda c: c.device.shares_host_memory and _is_offloaded(c) and not c.strategy.offload.uses_nvme,
        reason="offload: {offload} frees nothing on {device}, whose memory is the RAM of the machine",
        instead="offload: none",
        evidence="a copy within one memory frees nothing; CUDA C++ Programming Guide, integrated GPUs",
        reach=Reach.PLANNER,
    ),
    Incompatibility(
        name="one_memory_for_paged_state",
        is_broken=lambda c: (
            c.device.shares_host_memory and c.strategy.optimizer.facts.is_paged and not c.method.freezes_base
        ),
        reason="optimizer: {optimizer} pages nothing out of {device}, whose memory is the RAM of the machine",
        instead="adamw_fused",
        evidence="managed memory of an integrated GPU stays where it is",
        reach=Reach.PLANNER,
    ),
    Incompatibility(
        name="several_ranks_share_nothing",
        is_broken=lambda c: c.strategy.sharding.facts.is_one_rank and c.num_ranks > 1,
        reason="{sharding} would train {num_ranks} different models on {num_ranks} ranks",
        instead="ddp, or --gpus 0 for one device",
        evidence="gradients are not reduced: two such ranks of a tiny Llama were 0.059 off in loss within eight steps",
    ),
    Incompatibility(
        name="one_rank_has_no_peer",
        is_broken=lambda c: (
            not c.strategy.sharding.facts.is_one_rank and c.strategy.offload is Offload.NONE and c.num_ranks == 1
        ),
        reason="{sharding} spreads state over ranks, and there is one",
        instead="none",
        evidence="a partition over one rank is the whole state, and its buffers come on top (docs/memory-model.md)",
        reach=Reach.PLANNER,
    ),
    Incompatibility(
        name="hsdp_needs_groups",
        is_broken=lambda c: c.strategy.sharding.facts.shards_within_group and not c.group_sizes,
        reason="hsdp needs two groups or more of two ranks or more; {num_ranks} ranks have none in a node or of nodes",
        instead="fsdp or ddp",
        evidence="one group of all ranks is fsdp, groups of one are ddp: accelerate 1.15 refuses dp_shard_size 1",
    ),
    Incompatibility(
        name="bf16_needs_ampere",
        is_broken=lambda c: (
            c.strategy.precision in (Precision.BF16_MIXED, Precision.BF16) and c.capability_below((8, 0))
        ),
        reason="{precision} needs compute capability 8.0; {capability}",
        instead="fp16-mixed from compute capability 7.0, else fp32",
        evidence="CUDA C programming guide, tensor cores: bf16 from 8.0; older chips emulate it",
    ),
    Incompatibility(
        name="fp16_needs_tensor_cores",
        is_broken=lambda c: c.strategy.precision is Precision.FP16_MIXED and c.capability_below((7, 0)),
        reason="{precision} needs compute capability 7.0; {capability}",
        instead="fp32",
        evidence="CUDA C programming guide, tensor cores: fp16 from 7.0",
    ),
    Incompatibility(
        name="zero_multiplies_fp16_in_hardware",
        is_broken=lambda c: (
            c.strategy.precision is Precision.FP16_MIXED
            and c.strategy.sharding.uses_deepspeed
            and c.is_cpu
            and c.lacks_flag("avx512_fp16")
        ),
        reason="{precision} under {sharding} needs fp16 units, and {device} has no avx512_fp16",
        instead="ddp or fsdp, or fp32",
        evidence="DeepSpeed 0.19.8, engine.py: 'Type fp16 is not supported on your device'; autocast needs no units",
    ),
    Incompatibility(
        name="fp8_needs_ada",
        is_broken=lambda c: c.strategy.precision is Precision.FP8 and (c.is_cpu or c.capability_below((8, 9))),
        reason="fp8 needs compute capability 8.9; {capability}",
        instead="bf16-mixed from compute capability 8.0, else fp16-mixed",
        evidence="Transformer Engine 2, supported hardware: FP8 matrix products from Ada and Hopper on",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="fsdp_offload_needs_cuda",
        is_broken=lambda c: c.strategy.sharding.uses_fsdp and _is_offloaded(c) and c.is_cpu,
        reason="FSDP2's offload to host RAM needs an accelerator; {device} is none",
        instead="fsdp",
        evidence="torch 2.13: 'Cannot access accelerator device when none is available' as shards are made",
    ),
    Incompatibility(
        name="galore_needs_whole_gradients",
        is_broken=lambda c: c.method is Method.GALORE and c.strategy.sharding.shards_optimizer,
        reason="galore projects whole gradients and sharding: {sharding} cuts them",
        instead="ddp, or lora",
        evidence="galore-torch 1.0, galore_projector.py: an SVD of the gradient matrix of each weight",
    ),
    Incompatibility(
        name="galore_is_around_adam_or_adafactor",
        is_broken=lambda c: c.method is Method.GALORE and not c.strategy.optimizer.facts.runs_inside_foreign_galore,
        reason="inside galore runs adamw, adamw_8bit or adafactor, not {optimizer}",
        instead="adamw",
        evidence="galore-torch 1.0 has GaLoreAdamW, GaLoreAdamW8bit and GaLoreAdafactor",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="galore_inner_optimizer",
        is_broken=lambda c: c.method is Method.GALORE and not c.strategy.optimizer.facts.runs_inside_galore,
        reason="inside galore runs adamw, adamw_8bit or adafactor, not {optimizer}",
        instead="adamw",
        evidence="galore-torch 1.0 has no fused and no paged form",
    ),
    Incompatibility(
        name="galore_8bit_needs_cuda",
        is_broken=lambda c: c.method is Method.GALORE and c.strategy.optimizer.facts.is_8bit and c.is_cpu,
        reason="{optimizer} inside galore synchronizes with a CUDA device after each weight; {capability}",
        instead="adamw or adafactor",
        evidence="galore-torch 1.0, adamw8bit.py: torch.cuda.synchronize() in step; it fails on a CPU build",
    ),
    Incompatibility(
        name="nvme_takes_fp32_partitions",
        is_broken=lambda c: c.strategy.offload.uses_nvme and c.strategy.precision is Precision.BF16,
        reason="DeepSpeed treats a bf16 partition on NVMe as fp32 and stops",
        instead="bf16-mixed",
        evidence="DeepSpeed 0.19.8, optimizer_utils.release_memory: its assert on the dtype fails at the first step",
    ),
    Incompatibility(
        name="qlora_needs_whole_weights",
        is_broken=lambda c: c.method is Method.QLORA and c.strategy.sharding.facts.deepspeed_stage == 3,
        reason="ZeRO-3 partitions flat weights and cannot cut 4-bit blocks",
        instead="fsdp or zero2",
        evidence="bitsandbytes 0.50: a Params4bit is unpacked with the scales of its whole tensor",
    ),
    Incompatibility(
        name="fp8_multiplies_no_4_bit_weights",
        is_broken=lambda c: c.method is Method.QLORA and c.strategy.precision is Precision.FP8,
        reason="{precision} converts linear layers, and those of qlora's base are 4-bit ones",
        instead="bf16-mixed, or lora",
        evidence="bitsandbytes' Linear4bit multiplies in 16 bit; the blocks have no other linear layers",
    ),
    Incompatibility(
        name="dora_needs_layers_of_their_own",
        is_broken=lambda c: c.lora.dora and c.method.freezes_base and _adapts_experts(c),
        reason="train.lora.dora adapts linear layers, and the experts of this model are one tensor",
        instead="train.lora.targets without the experts, or train.lora.dora: false",
        evidence="PEFT 0.21, lora/layer.py: ParamWrapper does not work with use_dora",
    ),
    Incompatibility(
        name="frozen_base_has_no_update",
        is_broken=lambda c: c.method.freezes_base and not c.strategy.optimizer.facts.trains_adapters,
        reason="{optimizer} is for whole weights; {method} trains small adapters",
        instead="adamw_fused",
        evidence="LOMO, arXiv:2306.09782, saves gradients of whole weights, which a frozen base does not have",
    ),
)


FUSED_MODEL_TYPES = ("llama", "mistral", "qwen2")
BLACKWELL_RECIPES = (Fp8Recipe.MXFP8, Fp8Recipe.NVFP4)  # scales of 32 and 16 elements, which its units multiply by


def _has_tiles(c: RuleInput) -> bool:
    """True if any linear layer of a block divides into tiles; the others stay in 16 bit."""
    return c.fp8_recipe is None or bool(converted_shapes(c.shape, c.fp8_recipe))


def _is_too_old(c: RuleInput) -> bool:
    return c.fp8_recipe is not None and c.capability_below(FP8_RECIPES[c.fp8_recipe].capability)


def _may_be_sliced(c: RuleInput) -> bool:
    """True if the loss is computed in slices, or may be as nothing fixes it."""
    return c.loss in (None, LossHead.CHUNKED) and LossHead.CHUNKED in c.shape.loss_heads


def _lacks_package(c: RuleInput, package: Fp8Package) -> bool:
    return c.fp8_recipe is not None and FP8_RECIPES[c.fp8_recipe].package is package and c.lacks(package)


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
    # Groups of hybrid sharding.
    Incompatibility(
        name="shard_group_is_of_hsdp",
        is_broken=lambda c: c.shard_group is not None and not c.strategy.sharding.facts.shards_within_group,
        reason="shard_group is of sharding: hsdp, not of {sharding}",
        instead="hsdp",
        evidence="every other sharding spreads state over all ranks, or not at all",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="shard_group_divides_the_ranks",
        is_broken=lambda c: c.shard_group is not None and c.shard_group not in c.group_sizes,
        reason="shard_group: {shard_group} is no size of two groups or more inside a node or of whole nodes",
        instead="{group_sizes}, or fsdp",
        evidence="torch 2.13, init_device_mesh: the sizes of a mesh multiply to the ranks; neighbours share a copy",
    ),
    Incompatibility(
        name="reduction_of_micro_batches_is_of_fsdp",
        is_broken=lambda c: c.reduce_every_micro_batch and not c.strategy.sharding.uses_fsdp,
        reason="reduce_every_micro_batch is of FSDP2, not of {sharding}",
        instead="fsdp, fsdp_grad_op or hsdp",
        evidence="torch 2.13, set_requires_gradient_sync; DDP and ZeRO-1 accumulate where they reduce, ZeRO-2 and 3 "
        "reduce every micro batch (deepspeed 0.19.8, engine.py)",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="prefetch_of_two_blocks_is_of_fsdp",
        is_broken=lambda c: c.prefetch_two_blocks and not c.strategy.sharding.uses_fsdp,
        reason="prefetch_two_blocks is of FSDP2, not of {sharding}",
        instead="fsdp, fsdp_grad_op or hsdp",
        evidence="torch 2.13, set_modules_to_forward_prefetch and set_modules_to_backward_prefetch; ZeRO-3 has "
        "stage3_prefetch_bucket_size for it",
        reach=Reach.ALL,
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
    Incompatibility(
        name="compiled_head_is_of_slices",
        is_broken=lambda c: c.compiled_head and not _may_be_sliced(c),
        reason="compiled_head compiles the slices of loss: chunked, which pin.loss or the model rules out",
        instead="compiled_head: false, or loss: chunked",
        evidence="logits of all tokens have another number of rows in each micro batch that is padded",
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
        is_broken=lambda c: not _has_tiles(c),
        reason="{precision} splits matrices into tiles, and no linear layer has both dimensions a multiple of {tile}",
        instead="bf16-mixed",
        evidence="cuBLASLt: FP8 products need dimensions in multiples of 16; recipes by block need 32 or 128",
    ),
    Incompatibility(
        name="recipe_needs_torchao",
        is_broken=lambda c: _lacks_package(c, Fp8Package.TORCHAO),
        reason="fp8_recipe: {recipe} needs torchao, which is not installed",
        instead="{install[torchao]}",
        evidence="its linear layer is torchao's",
    ),
    Incompatibility(
        name="recipe_needs_transformer_engine",
        is_broken=lambda c: _lacks_package(c, Fp8Package.TRANSFORMER_ENGINE),
        reason="fp8_recipe: {recipe} needs transformer-engine, which is not installed",
        instead="torchao_tensorwise, or {install[fp8]}, which compiles with nvcc",
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
    Incompatibility(
        name="compiled_blocks_hold_no_hooks_on_routers",
        is_broken=lambda c: c.compile and c.router_aux_loss is not None,
        reason="train.router_aux_loss collects the logits of routers inside of blocks, which compile traces as a whole",
        instead="compile: false",
        evidence="not run: hooks would keep tensors of a compiled and recomputed region beyond its end",
    ),
    # Liger's kernels in blocks.
    Incompatibility(
        name="compiled_blocks_are_fused",
        is_broken=lambda c: c.fused_kernels and c.compile,
        reason="fused_kernels are for blocks that run eagerly; compile fuses the same operations",
        instead="one of them",
        evidence="torch 2.13: Inductor makes one kernel of each chain of elementwise operations of a block",
    ),
    Incompatibility(
        name="fused_kernels_need_liger",
        is_broken=lambda c: c.fused_kernels and (c.is_cpu or c.lacks("liger-kernel")),
        reason="fused_kernels are Liger's Triton kernels and need a GPU and liger-kernel",
        instead="fused_kernels: false, or {install[liger]}",
        evidence="liger-kernel is written in Triton, which has no CPU target",
    ),
    Incompatibility(
        name="fused_kernels_know_the_model",
        is_broken=lambda c: c.fused_kernels and c.shape.model_type not in FUSED_MODEL_TYPES,
        reason="fused_kernels replace the modules of llama, mistral and qwen2, not those of {model_type}",
        instead="compile: true",
        evidence="liger-kernel 0.8.5, monkey_patch.py: these have one RMSNorm, one SwiGLU and one rotary embedding",
    ),
    Incompatibility(
        name="selective_saves_what_rotary_overwrites",
        is_broken=lambda c: c.fused_kernels and c.checkpointing is Checkpointing.SELECTIVE,
        reason="fused_kernels rotate query and key in place, which checkpointing: selective has saved unrotated",
        instead="checkpointing: full or none",
        evidence="liger-kernel 0.8.5, ops/rope.py: it overwrites its inputs, which a recomputation rotates again",
    ),
    # Adapters in one function with their layers.
    Incompatibility(
        name="fused_adapters_need_adapters",
        is_broken=lambda c: c.fused_adapters and not c.method.freezes_base,
        reason="fused_adapters are of lora and qlora; method: {method} has no adapters",
        instead="fused_adapters: false, or method: lora or qlora",
        evidence="the function has gradients of the adapter and of the input, and none of the layer's weight",
        reach=Reach.ALL,
    ),
    Incompatibility(
        name="fused_adapters_are_products_alone",
        is_broken=lambda c: c.fused_adapters and (c.lora.dora or c.lora.dropout > 0),
        reason="fused_adapters compute low-rank products alone, without train.lora.dropout and train.lora.dora",
        instead="fused_adapters: false, or train.lora.dropout: 0 and train.lora.dora: false",
        evidence="a dropout gives each layer an input of its own; DoRA multiplies rows of the whole weight",
    ),
    Incompatibility(
        name="fused_adapters_add_to_16_bit_products",
        is_broken=lambda c: c.fused_adapters and c.strategy.precision is Precision.FP8,
        reason="fused_adapters compute the gradient of the input from whole weights, and {precision} has its own",
        instead="bf16-mixed, or fused_adapters: false",
        evidence="Transformer Engine's and torchao's layers have autograd functions with scales of their own",
    ),
    Incompatibility(
        name="compiled_blocks_fuse_adapters",
        is_broken=lambda c: c.fused_adapters and c.compile,
        reason="fused_adapters are for blocks that run eagerly; compile joins an adapter's casts and sums itself",
        instead="one of them",
        evidence="torch 2.13: Inductor makes one kernel of the cast, the factor and the sum of an adapter",
    ),
    Incompatibility(
        name="selective_saves_what_adapters_add_to",
        is_broken=lambda c: c.fused_adapters and c.checkpointing is Checkpointing.SELECTIVE,
        reason="fused_adapters add to the layer's product in place, which checkpointing: selective has saved",
        instead="checkpointing: full or none",
        evidence="torch 2.13, utils/checkpoint.py: a cached tensor that was changed since is an error",
    ),
    Incompatibility(
        name="fused_adapters_read_whole_weights",
        is_broken=lambda c: c.fused_adapters and c.strategy.sharding.facts.deepspeed_stage == 3,
        reason="fused_adapters read the weights of three modules, and {sharding} gathers those of the one that runs",
        instead="fsdp or zero2",
        evidence="deepspeed 0.19.8, parameter_offload.py: a module's weights are gathered in the hook of its forward",
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
    # The table of input embeddings.
    Incompatibility(
        name="embedding_on_host_is_frozen",
        is_broken=lambda c: c.embedding_on_host and not c.method.freezes_base,
        reason="method: {method} trains the embeddings that embedding_on_host keeps in host RAM",
        instead="embedding_on_host: false, or method: lora or qlora",
        evidence="a gradient of the table would have as many rows as the batch has tokens, each step over PCIe",
    ),
    Incompatibility(
        name="embedding_on_host_is_no_head",
        is_broken=lambda c: c.embedding_on_host and c.shape.is_tied,
        reason="the head of this {model_type} multiplies with the table that embedding_on_host keeps in host RAM",
        instead="embedding_on_host: false",
        evidence="transformers, tie_word_embeddings: lm_head.weight is the parameter of the embedding",
    ),
    Incompatibility(
        name="embedding_on_host_is_of_one_rank",
        is_broken=lambda c: c.embedding_on_host and not c.strategy.sharding.facts.is_one_rank,
        reason="embedding_on_host is of one GPU that holds the model itself",
        instead="embedding_on_host: false, or sharding: none on one GPU (--gpus 0)",
        evidence="DDP sends every parameter from the first rank to the others by NCCL; FSDP2 and ZeRO share tables out",
    ),
    Incompatibility(
        name="embedding_is_on_the_host",
        is_broken=lambda c: c.embedding_on_host and (c.is_cpu or c.device.shares_host_memory),
        reason="embedding_on_host: the table is in host RAM already, which is the memory of the device",
        instead="embedding_on_host: false",
        evidence="a copy from host RAM to host RAM frees nothing",
        reach=Reach.PLANNER,
    ),
)
