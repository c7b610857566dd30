"""Prints what attention does on devices that are not there, as JSON by case: its kernels, what the host waits for."""

import json
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardwise.trainer.runtime.attention import choose_attention_kernels
from shardwise.trainer.runtime.attention.packed import packed_sdpa
from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.loop.step import forward
from shardwise.trainer.runtime.models.build import make_trainable, model_from_config
from shardwise.trainer.simulation.build import materialise
from shardwise.trainer.simulation.fake_device import FakeDeviceMode, as_if_available, enable_fake_cuda
from shardwise.trainer.simulation.kernels import Kernels
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead

HEADS, KV_HEADS, WIDTH, HEAD_DIM = 8, 2, 64, 64
BOUNDS = (0, 40, WIDTH, 2 * WIDTH)
CASES = {
    "Turing fp16": ((7, 5), torch.float16, None),
    "Hopper fp32": ((9, 0), torch.float32, None),
    "Hopper bf16": ((9, 0), torch.bfloat16, None),
    "Hopper bf16 by autocast": ((9, 0), torch.float32, torch.bfloat16),
}


class Layer(torch.nn.Module):
    num_key_value_groups = HEADS // KV_HEADS
    is_causal = True


def calls(capability: tuple[int, int], dtype: torch.dtype, autocast: torch.dtype | None, **packed: Any) -> Any:
    """How often each kernel of `scaled_dot_product_attention` was called, and what kept documents apart."""
    kernels, layer = Kernels("cuda", capability), Layer()
    attend: Callable[..., Any] = packed_sdpa if packed else sdpa_attention_forward
    with as_if_available(capability), kernels.installed(), FakeDeviceMode():
        shapes = [(2, each, WIDTH, HEAD_DIM) for each in (HEADS, KV_HEADS, KV_HEADS)]
        heads = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        if packed:
            packed["cu_seq_lens_q"] = torch.empty(len(BOUNDS), dtype=torch.int32, device="cuda")
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            out, _ = attend(layer, *heads, None, **packed)
    assert out.shape == (2, WIDTH, HEADS, HEAD_DIM)
    return dict(kernels.attention), getattr(layer, "document_kernel", None)


def question(model_type: str, capability: tuple[int, int]) -> str | None:
    """The operation with which a forward of packed rows reads a tensor of the device; None where none does."""
    config = {"model_type": model_type, "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8}
    with torch.device("meta"):
        model = model_from_config(config, dtype=torch.float16, attention=Attention.SDPA)
    make_trainable(model, Checkpointing.NONE, LossHead.CHUNKED, loss_chunk_tokens=None)
    with as_if_available(capability), FakeDeviceMode():
        materialise(model, "cuda")
        ids = torch.zeros(2, WIDTH, dtype=torch.long)
        rows = MicroBatch(ids, ids.clone(), 2 * WIDTH - 3, position_ids=ids.clone(), document_bounds=BOUNDS)
        try:
            forward(model, rows, torch.device("cuda"))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return str(error.func)
    return None


def main() -> None:
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    enable_fake_cuda()
    choose_attention_kernels()
    bounds = {"cu_seq_lens_k": np.array(BOUNDS)}
    found = {
        f"{name}{way}": calls(*case, **more)
        for name, case in CASES.items()
        for way, more in (("", {}), (", packed", bounds), (", packed in a window", {**bounds, "sliding_window": 16}))
    }
    questions = {
        f"{model_type} {capability[0]}": question(model_type, capability)
        for model_type, capability in product(("llama", "mistral"), ((7, 5), (9, 0)))
    }
    sys.stdout.write(json.dumps({"has_cudnn": has_cudnn, "calls": found, "questions": questions}))


if __name__ == "__main__":
    main()
