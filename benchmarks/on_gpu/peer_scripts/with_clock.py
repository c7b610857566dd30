"""Runs somebody's training script or module as it is, with a clock at the end of each step.

    python with_clock.py FOLDER WHERE SCRIPT.py [ARGUMENT ...]
    python with_clock.py FOLDER WHERE -m MODULE [ARGUMENT ...]

WHERE says what the end of a step is: `callback`, transformers' Trainer has ended a step, also under what is built on
it; `print`, the script prints a step and its loss; `optimizer`, torch's optimizer has updated the weights.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from step_clock import StepClock


def main() -> None:
    """Listens, then becomes what it was asked to run."""
    folder, where, *rest = sys.argv[1:]
    clock = StepClock(Path(folder))
    names: dict[str, Any] = {}
    if where == "callback":
        _listen_to_trainer(clock, is_unsloth="unsloth" in " ".join(rest))
    elif where == "optimizer":
        _listen_to_optimizer(clock)
    else:
        names["print"] = _listening_print(clock)
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], init_globals=names, run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        runpy.run_path(rest[0], init_globals=names, run_name="__main__")


def _listen_to_trainer(clock: StepClock, *, is_unsloth: bool) -> None:
    """Adds a callback to those that every Trainer of transformers begins with."""
    if is_unsloth:
        import unsloth  # noqa: F401  # it patches what is imported after it
    import transformers.trainer
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, _args: object, state: Any, _control: object, **_: object) -> None:  # noqa: ANN401  # transformers' own
            clock.end_of_step(state.global_step)

        def on_log(self, _args: object, state: Any, _control: object, logs: Any = None, **_: object) -> None:  # noqa: ANN401  # as above
            if logs and "loss" in logs:
                clock.loss_of_step(state.global_step, float(logs["loss"]))

    transformers.trainer.DEFAULT_CALLBACKS.append(Clock)


def _listen_to_optimizer(clock: StepClock) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    num_steps = 0

    def told(optimizer: object, *_: object) -> None:
        nonlocal num_steps
        if hasattr(optimizer, "optimizers"):  # torchtitan's container is one itself: what it holds was told already
            return
        num_steps += 1
        clock.end_of_step(num_steps)

    register_optimizer_step_post_hook(told)


def _listening_print(clock: StepClock) -> Callable[[int, float], None]:
    """What the loop of a script says at the end of a step: its number and its loss."""

    def told(step: int, loss: float) -> None:
        clock.end_of_step(step, loss=loss)

    return told


if __name__ == "__main__":
    main()
