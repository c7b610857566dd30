"""A tiny Llama and steps of an optimizer on it, on random tokens or on no gradient at all."""

from typing import Any

import torch
from engine_plan_factory import TINY_LLAMA
from rank_factory import SEED, SEQ_LEN
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer as TorchOptimizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.optimizers import set_learning_rate, updates_in_backward

# Of TINY_LLAMA: tensors of 4,096 elements and more, and those below (keys, values, norms).
NUM_LARGE, NUM_SMALL = 12, 9


def tiny_llama(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    fields = {**TINY_LLAMA, "max_position_embeddings": SEQ_LEN, **config}
    fields.pop("model_type")
    return LlamaForCausalLM(LlamaConfig(**fields))


def random_gradients(model: nn.Module, *, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def random_loss(model: PreTrainedModel, *, step: int) -> Tensor:
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def assert_same_weights(model: nn.Module, other: nn.Module, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """To the bit, where no tolerance is given."""
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()), rtol=rtol, atol=atol)


def train_steps(model: PreTrainedModel, optimizer: TorchOptimizer, steps: range, *, lr: float) -> None:
    for step in steps:
        set_learning_rate(optimizer, lr)
        random_loss(model, step=step).backward()
        if not updates_in_backward(optimizer):
            optimizer.step()
            optimizer.zero_grad()
