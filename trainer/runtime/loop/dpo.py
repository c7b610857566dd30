"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7), the sigmoid loss.

Of a pair, the model and a reference say how likely each answer is given the prompt: the sum of the log-probabilities of
its tokens. The reward of an answer is beta times what the model says more than the reference, and the loss of a pair is
-log sigmoid(reward of the chosen - reward of the rejected), its mean taken over the pairs of the global batch. Beta is
how strongly the model is held to the reference.

A micro batch of P pairs is 2 P rows, all chosen ones before all rejected ones. Dummies, which fill a last round, come
last in each half and count for nothing. Where the reference comes from is in reference.py.

Dropout is off, as in the authors' code: the rewards compare two models, not two masks. That of adapters stays, as the
job asks for it by name; the reference has none.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.runtime.data.batches import MicroBatch
from trainer.runtime.loop.step import Terms, forward
from trainer.runtime.loss.head import IGNORED, Answer

Reference = Callable[[nn.Module, MicroBatch, torch.device], Tensor]  # log-probabilities [2 P] in float64, no gradient


class DpoLoss(NamedTuple):
    """The objective: pairs, against a reference."""

    beta: float
    reference: Reference
    figures: tuple[str, ...] = (
        "reward_margin",
        "reward_accuracy",  # share of the pairs whose chosen answer has the higher reward
        "reward_chosen",
        "reward_rejected",
        "logps_chosen",
        "logps_rejected",
        "tokens_chosen",  # targets
    )

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        reference = self.reference(model, micro_batch, device)  # first: it leaves nothing behind
        policy = forward(model, micro_batch, device, answer=Answer.ROWS)
        pairs = _Pairs(policy.view(2, -1), reference.view(2, -1), micro_batch.num_pairs, self.beta)
        tokens_chosen = (micro_batch.labels[: len(policy) // 2] != IGNORED).sum().to(device)
        figures = (*pairs.figures(), tokens_chosen)
        return Terms(pairs.loss(), micro_batch.num_pairs, micro_batch.num_targets, figures)


class _Pairs(NamedTuple):
    """Log-probabilities of chosen and rejected answers [2, P]; from pair `num_pairs` on they are dummies."""

    policy: Tensor
    reference: Tensor
    num_pairs: int
    beta: float

    def loss(self) -> Tensor:
        """Summed over the pairs, a scalar in fp32."""
        chosen, rejected = self._rewards()
        return -functional.logsigmoid(chosen - rejected).sum().float()

    def figures(self) -> tuple[Tensor, ...]:
        """Sums over the pairs, in the order of the objective's names."""
        chosen, rejected = (reward.detach() for reward in self._rewards())
        margin = chosen - rejected
        logps = self.policy.detach()[:, : self.num_pairs].sum(1)
        return (margin.sum(), (margin > 0).sum(), chosen.sum(), rejected.sum(), *logps)

    def _rewards(self) -> tuple[Tensor, Tensor]:
        """[num_pairs] each."""
        chosen, rejected = self.beta * (self.policy - self.reference)[:, : self.num_pairs]
        return chosen, rejected


def turn_dropout_off(model: nn.Module) -> None:
    """No dropout of the model's own in training either; that of adapters stays as it is."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." not in name:
            module.p = 0.0
        for setting in [setting for setting, value in vars(module).items() if isinstance(value, float)]:
            if "drop" in setting and not isinstance(module, nn.Dropout):
                setattr(module, setting, 0.0)  # attention_dropout, hidden_dropout, attn_pdrop, ...
