"""The loss that balances the experts of a mixture, by transformers' own function (arXiv:2101.03961).

For E experts, of which a token goes to k: E times the sum over experts of the share of tokens that an expert gets and
its mean probability, over all tokens of all layers. It is 1 for k = 1 and k in general where all experts are used
alike. transformers adds it to the mean loss of a batch, times a coefficient; so does a step here, for each micro batch:

    loss of a step = sum over micro batches of (token losses + coefficient x balance x targets) / targets of the step

It is the mean of transformers' own losses of the micro batches, weighted by their targets. As the balance of a batch is
no sum over its tokens, it depends on how rows are cut into micro batches and ranks, as in transformers. Padding does
not count; a packed row counts each of its tokens once, as if its documents stood alone.

Logits are collected by hooks on the routers that the model's class names, during the forward of training only: not in
an evaluation, and not when a block runs again for its backward.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from shardwise.trainer.spec.errors import InputError

_FUNCTION = "load_balancing_loss_func"
_LOGITS = "router_logits"


class RouterLoss:
    """Collects the routers' logits of a forward, and computes their loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        problem = router_loss_problem(model)
        if problem is not None:
            raise InputError(f"train.router_aux_loss: {problem}; remove it")
        sized: Any = model
        self._function, self._sizes = _function_of(model), (sized.num_experts, sized.num_experts_per_tok)
        self._logits: list[Tensor] | None = None
        for module, index in _routers(model):
            module.register_forward_hook(self._hook(index))

    def begin(self) -> None:
        """From here on logits are collected."""
        self._logits = []

    def end(self, mask: Tensor | None) -> Tensor:
        """The loss of what was collected, a scalar; `mask` [B, S] is 0 on padding, None where there is none."""
        logits, self._logits = self._logits, None
        assert logits, "no router has run"
        num_experts, top_k = self._sizes
        found = self._function(tuple(each.flatten(0, -2) for each in logits), num_experts, top_k, mask)
        assert isinstance(found, Tensor)
        return found

    def _hook(self, index: int) -> Callable[..., None]:
        def collect(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401  # torch's
            if self._logits is not None:
                self._logits.append(output[index] if isinstance(output, tuple) else output)

        return collect


def router_loss_problem(model: PreTrainedModel) -> str | None:
    """Why the loss cannot be computed for a model, or None."""
    if _function_of(model) is None or not hasattr(model, "num_experts_per_tok") or not hasattr(model, "num_experts"):
        return (
            f"transformers has no such loss for {model.config.model_type}, which has no experts, or balances them by a "
            "bias of each one, as DeepSeek-V3 does"
        )
    return None if any(True for _ in _routers(model)) else f"{type(model).__name__} does not return its routers' logits"


def row_mask(row_lengths: tuple[int, ...], width: int, device: torch.device) -> Tensor | None:
    """1 for each token of a row and 0 for padding, [B, S]; None where no row has padding."""
    if not row_lengths:
        return None
    lengths = torch.tensor(row_lengths, device=device)
    return (torch.arange(width, device=device) < lengths.unsqueeze(1)).to(torch.int64)


def _function_of(model: PreTrainedModel) -> Any:  # noqa: ANN401  # a function of transformers
    modules = (sys.modules[owner.__module__] for owner in type(model).__mro__)  # FSDP2 puts a class of its own first
    return next((found for module in modules if (found := getattr(module, _FUNCTION, None)) is not None), None)


def _routers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, int]]:
    """The modules whose output has logits of a router, and where in it; in the order of the layers."""
    for part in model.modules():
        recorded = getattr(part, "_can_record_outputs", None) or {}
        if isinstance(part, PreTrainedModel) and _LOGITS in recorded:
            wanted = recorded[_LOGITS]
            recorders = wanted if isinstance(wanted, list) else [wanted]
            for module in part.modules():
                for each in recorders:
                    recorder = each if isinstance(each, OutputRecorder) else OutputRecorder(each, index=1)
                    if recorder.target_class is not None and isinstance(module, recorder.target_class):
                        yield module, recorder.index
            return
