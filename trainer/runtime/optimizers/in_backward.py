"""Updates inside the backward pass: each weight is updated as soon as its gradient is complete, which is then freed.

Every optimizer that updates a parameter from that parameter alone can run so, and all of ours can. One object stays in
charge: a hook shows it one parameter and calls its `step`, so groups, learning rate and state are where they always
are. torch calls the hooks (`register_post_accumulate_grad_hook`) when all uses of a weight have added to its gradient.
No two gradients wait for each other, so nothing can be clipped by the norm of all of them, scaled by a loss scaler,
added up over micro batches, or summed over ranks by DistributedDataParallel, which reduces after the hook. FSDP2 calls
hooks on its shards after it has reduced them; its shards replace the parameters after the optimizer was built, so hooks
are set anew where one is missing.
"""

from functools import partial

from torch import Tensor
from torch.optim.optimizer import Optimizer as TorchOptimizer
from torch.utils.hooks import RemovableHandle

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Method, Precision


class BackwardUpdates:
    """The hooks of one optimizer."""

    def __init__(self, optimizer: TorchOptimizer) -> None:
        self._optimizer = optimizer
        self._hooks: dict[int, RemovableHandle] = {}  # by the parameter's identity
        self.num_updates = 0  # made so far

    @property
    def num_hooks(self) -> int:
        """Parameters that have one."""
        return len(self._hooks)

    def attach(self) -> None:
        """Gives every parameter of the optimizer a hook, and removes hooks of other parameters."""
        wanted = {
            id(parameter): (parameter, index)
            for index, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }
        for stale in self._hooks.keys() - wanted.keys():
            self._hooks.pop(stale).remove()
        for key, (parameter, index) in wanted.items():
            if key not in self._hooks:
                self._hooks[key] = parameter.register_post_accumulate_grad_hook(partial(self._update, index))

    def _update(self, index: int, parameter: Tensor) -> None:
        """Updates one parameter of group `index` and frees its gradient."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = [{**groups[index], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None
        self.num_updates += 1


def run_in_backward(optimizer: TorchOptimizer) -> None:
    """From now on, every backward pass updates the parameters of `optimizer`; its `step` finds nothing to do."""
    updates = BackwardUpdates(optimizer)
    updates.attach()
    optimizer.__dict__["backward_updates"] = updates  # an attribute that torch's class does not declare


def backward_updates(optimizer: TorchOptimizer) -> BackwardUpdates | None:
    """The hooks of an optimizer that runs in the backward pass; None of one that does not."""
    found = optimizer.__dict__.get("backward_updates")
    assert found is None or isinstance(found, BackwardUpdates)
    return found


def check_in_backward(chosen: Candidate, *, is_layerwise: bool = False) -> None:
    """InputError where a candidate updates inside the backward pass and cannot; `is_layerwise` is GaLore's."""
    what = _what(chosen, is_layerwise=is_layerwise)
    if what is None:
        return
    strategy = chosen.strategy
    if chosen.accumulation > 1:
        raise InputError(
            f"{what} does not accumulate gradients over {chosen.accumulation} micro batches; "
            f"set pin.micro_batch: {chosen.micro_batch * chosen.accumulation}, or an update after the backward pass"
        )
    if not strategy.sharding.facts.updates_in_backward:
        raise InputError(
            f"{what} uses gradients before {strategy.sharding} has summed them over the ranks; "
            f"set pin.sharding: {' or '.join(each for each in Sharding if each.facts.updates_in_backward)}"
        )
    if strategy.precision is Precision.FP16_MIXED:
        raise InputError(f"{what} uses gradients before fp16's loss scale is removed; use bf16-mixed or fp32")


def _what(chosen: Candidate, *, is_layerwise: bool) -> str | None:
    if chosen.strategy.optimizer.facts.updates_in_backward:
        return f"optimizer {chosen.strategy.optimizer}"
    if chosen.optimizer_in_backward:
        return "pin.optimizer_in_backward"
    return "train.galore.layerwise" if is_layerwise and chosen.method is Method.GALORE else None
