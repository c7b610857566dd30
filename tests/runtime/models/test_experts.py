"""Experts of a mixture: sorted tokens and grouped matrix products, however many experts there are."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.trainer.runtime.models.build import make_trainable, model_from_config
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_experts_per_tok": 2, "intermediate_size": 16,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 16},
}


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_multiplied_in_groups(model_type: str, dtype: torch.dtype) -> None:
    config = {"model_type": model_type, **SIZES, **MIXTURES[model_type]}
    model = model_from_config(config, dtype=dtype, attention=Attention.SDPA)
    make_trainable(model, Checkpointing.NONE, LossHead.EAGER, loss_chunk_tokens=None)
    ids = torch.arange(16)[None]
    with Operators() as operators:
        model(input_ids=ids, labels=ids).backward()
    products = 2 * 3 * SIZES["num_hidden_layers"]  # two matrices an expert: forward, and the gradients of both factors
    assert operators.counts["aten._grouped_mm.default"] == products
