"""Activations on their way to host RAM and back, seen on a GPU: the peak falls, and copies run beside the compute."""

from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.attention import choose_attention_kernels
from shardwise.trainer.runtime.loss import install_loss_head
from shardwise.trainer.runtime.memory.activation_offload import ActivationOffload, offload_activations
from shardwise.trainer.runtime.memory.recomputation import apply_checkpointing
from shardwise.trainer.spec.strategy import Checkpointing, LossHead

pytestmark = pytest.mark.gpu
NUM_BLOCKS, ROWS, WIDTH = 8, 8, 1024


@pytest.fixture
def card(card: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """With the attention kernels of a run; their backward adds up in one order, not so by default."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
    choose_attention_kernels()
    torch.use_deterministic_algorithms(True)  # a warning alone leaves the kernels as they are
    yield card
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def build(
    card: torch.device, *, offloads: bool, checkpointing: Checkpointing = Checkpointing.NONE
) -> tuple[PreTrainedModel, ActivationOffload | None]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=16, num_key_value_heads=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.config.use_cache = False
    apply_checkpointing(model, checkpointing)
    install_loss_head(model, LossHead.CHUNKED, chunk_tokens=1024)
    offload = offload_activations(model, checkpointing) if offloads else None
    return model.to(card).train(), offload


def step(model: PreTrainedModel, card: torch.device) -> float:
    ids = torch.randint(0, 512, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1)).to(card)
    with torch.autocast("cuda", torch.bfloat16 if torch.cuda.get_device_capability(card) >= (8, 0) else torch.float16):
        loss = model(input_ids=ids, labels=ids)
    loss.backward()
    return float(loss.detach())


def peak_of(model: PreTrainedModel, card: torch.device) -> tuple[int, float, torch.Tensor]:
    """(bytes above what is held, gradients included, loss, the gradient of one weight) of a second step."""
    step(model, card)
    model.zero_grad(set_to_none=False)  # else the peak of recomputed blocks is where the last gradient arrives
    torch.cuda.synchronize(card)
    torch.cuda.reset_peak_memory_stats(card)
    held = torch.cuda.memory_allocated(card)
    loss = step(model, card)
    gradient = next(p.grad for name, p in model.named_parameters() if "q_proj" in name)
    return torch.cuda.max_memory_allocated(card) - held, loss, gradient.cpu()


@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL, Checkpointing.ATTENTION])
def test_what_is_moved_leaves_the_device_and_changes_nothing(checkpointing: Checkpointing, card: torch.device) -> None:
    retained, loss, gradient = peak_of(build(card, offloads=False, checkpointing=checkpointing)[0], card)
    model, offload = build(card, offloads=True, checkpointing=checkpointing)
    moved, same_loss, same_gradient = peak_of(model, card)
    assert same_loss == loss
    torch.testing.assert_close(same_gradient, gradient, rtol=0, atol=0)
    moved_bytes = offload.moved_bytes
    one_block = moved_bytes / (NUM_BLOCKS - 1)
    # But for the blocks at work and in transit.
    assert moved_bytes - 2.2 * one_block < retained - moved < 1.05 * moved_bytes


def test_copies_run_beside_the_compute(card: torch.device) -> None:
    torch.use_deterministic_algorithms(False)  # which fills new tensors, in time that a run does not spend
    model, _ = build(card, offloads=True)
    step(model, card)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(model, card)
        torch.cuda.synchronize(card)
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    copies = [
        e.time_range for e in events if "Memcpy DtoH (Device -> Pinned)" in e.name or "Memcpy HtoD (Pinned" in e.name
    ]
    kernels = [e.time_range for e in events if "Mem" not in e.name]
    assert copies and kernels
    beside_us = sum(max(0, min(c.end, k.end) - max(c.start, k.start)) for c in copies for k in kernels)
    total_us = [sum(each.end - each.start for each in ranges) for ranges in (copies, kernels)]
    assert beside_us > min(total_us) / 2, "of what is faster, most is hidden by the other"
