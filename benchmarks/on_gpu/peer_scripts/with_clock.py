"""Runs a trainer unchanged, with a clock at the end of each step.

    python with_clock.py FOLDER SCRIPT.py
    python with_clock.py FOLDER axolotl.cli.train CONFIG.yaml

A step ends with the callback of transformers' Trainer and its subclasses, or when the script prints the number of a
step and its loss.
"""

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

from step_clock import StepClock


def main() -> None:
    """Adds the clock, then runs the script, or the module with its arguments."""
    folder, target, *rest = sys.argv[1:]
    clock = StepClock(Path(folder))
    sys.argv = [target, *rest]
    if not target.endswith(".py"):
        _add_callback(clock)
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    script = Path(target).read_text()
    if "from unsloth import" in script:
        importlib.import_module("unsloth")  # it must be imported before transformers, which the callback needs
    if "Trainer" in script:
        _add_callback(clock)

    def print_step(step: int, loss: float) -> None:
        clock.end_of_step(step, loss=loss)

    runpy.run_path(target, init_globals={"print": print_step}, run_name="__main__")


def _add_callback(clock: StepClock) -> None:
    """Adds a callback to the defaults of every transformers Trainer."""
    import transformers.trainer
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401  # transformers' own
            clock.end_of_step(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ANN401  # as above
            if logs and "loss" in logs:
                clock.loss_of_step(state.global_step, float(logs["loss"]))

    callbacks: list[type[TrainerCallback]] = transformers.trainer.DEFAULT_CALLBACKS  # type: ignore[assignment]  # typed by its first
    callbacks.append(Clock)


if __name__ == "__main__":
    main()
