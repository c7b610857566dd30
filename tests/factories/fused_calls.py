"""Prints what attention does on devices that are not there, as JSON by case: its kernels."""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardwise.trainer.runtime.attention import choose_attention_kernels
from shardwise.trainer.runtime.attention.packed import packed_sdpa
from shardwise.trainer.simulation.fake_device import FakeDeviceMode, as_if_available, enable_fake_cuda
from shardwise.trainer.simulation.kernels import Kernels

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
    sys.stdout.write(json.dumps({"has_cudnn": has_cudnn, "calls": found}))


if __name__ == "__main__":
    main()
