"""The sliced loss head (`chunked`) by torch.compile: the losses of one slice, and the gradient of its logits.

In plain torch each operator of a slice reads and writes its logits in fp32. Compiled, the product is one kernel and the
rest few, which read it in the computing type. The one-hot of the targets is a comparison, not a scattered sum.

Every slice has the same number of tokens, so nothing is compiled a second time: the last one is filled up with tokens
that are not learned, and what is computed of those is dropped. The bodies are whole graphs: a graph break and a new
compilation beyond torch's limit are errors. Nothing falls back; only a job that pins it has it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.trainer.runtime.loss import IGNORED, Head
from shardwise.trainer.runtime.memory.compilation import check_compiler, num_graphs
from shardwise.trainer.spec.errors import EnvironmentFaultError


class CompiledSlices:
    """The compiled bodies of a head, which compile at their first call; counts calls and graphs."""

    def __init__(self, slice_tokens: int) -> None:
        check_compiler("pin.compiled_head")
        import torch._dynamo  # after the check: it takes seconds

        torch._dynamo.config.fail_on_recompile_limit_hit = True
        self._slice_tokens = slice_tokens
        self._losses, self._gradient = (
            torch.compile(body, fullgraph=True, dynamic=False) for body in (_losses, _gradient)
        )
        self.num_forwards = self.num_backwards = self.num_graphs = 0

    def losses(self, hidden: Tensor, head: Head, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the log of the normaliser of each token [C] of hidden [C, H], both in fp32."""
        self.num_forwards += 1
        found = self._run(self._losses, *head, *self._filled(hidden, targets))
        losses, log_normalisers = (each[: hidden.shape[0]] for each in found)
        return losses, log_normalisers

    def gradient(
        self, hidden: Tensor, head: Head, targets: Tensor, log_normalisers: Tensor, shares: Tensor | None
    ) -> Tensor:
        """The gradient of the logits [C, V], in the head's type; `shares` [C, 1] multiply it."""
        self.num_backwards += 1
        filled = self._filled(hidden, targets, log_normalisers, shares)
        gradient: Tensor = self._run(self._gradient, *head, *filled)
        return gradient[: hidden.shape[0]]

    def check_ran(self) -> None:
        """EnvironmentFaultError if, after a step, no slice has run compiled."""
        if not self.num_backwards:
            raise EnvironmentFaultError(
                "pin.compiled_head: no slice of the first step ran compiled; set pin.compiled_head=false"
            )

    def facts(self) -> dict[str, str]:
        """Text of what has run compiled."""
        calls = f"{self.num_forwards} slices forwards, {self.num_backwards} backwards"
        return {"compiled head": f"{self.num_graphs} graphs without a break, {calls} of {self._slice_tokens} tokens"}

    def _run(self, body: Callable[..., Any], weight: Tensor, bias: Tensor | None, *inputs: Any) -> Any:  # noqa: ANN401  # the inputs of a body
        before = num_graphs()
        found = body(weight.detach(), None if bias is None else bias.detach(), *inputs)
        self.num_graphs += num_graphs() - before
        return found

    def _filled(self, hidden: Tensor, targets: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        """The inputs with as many tokens as a slice has; without gradients, which would be another graph."""
        missing, hidden = self._slice_tokens - hidden.shape[0], hidden.detach()
        if not missing:
            return hidden, targets, *others
        rows = (None if each is None else _longer(each, missing) for each in (hidden, *others))
        first, *rest = rows
        return first, functional.pad(targets, (0, missing), value=IGNORED), *rest


def _longer(tensor: Tensor, num_rows: int) -> Tensor:
    return functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, num_rows))


def _losses(
    weight: Tensor, bias: Tensor | None, softcap: float | None, hidden: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    logits = Head(weight, bias, softcap).logits(hidden)
    log_normalisers = logits.logsumexp(-1)
    picked = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (log_normalisers - picked).masked_fill(targets == IGNORED, 0.0), log_normalisers


def _gradient(
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    hidden: Tensor,
    targets: Tensor,
    log_normalisers: Tensor,
    shares: Tensor | None,
) -> Tensor:
    logits = Head(weight, bias, softcap).logits(hidden)
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets.unsqueeze(-1)
    gradient = (logits - log_normalisers.unsqueeze(-1)).exp() - is_target.float()
    if softcap is not None:
        gradient = gradient * (1 - (logits / softcap).square())
    if shares is not None:
        gradient = gradient * shares
    return gradient.masked_fill((targets == IGNORED).unsqueeze(-1), 0.0).to(weight.dtype)
