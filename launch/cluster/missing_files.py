"""What a job needs from a network and this machine does not have, in words: for `fetch`, and for `submit` to refuse."""

import os
from collections.abc import Iterator, Mapping

from launch.inputs.trusted_code import has_kernel
from launch.plan.gather import PlanInputs


def missing_for(
    inputs: PlanInputs, *, kernel: str | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """`the weights of org/model`, `the data of org/rows`, `the kernel ...`; `kernel` is the one that the plan runs.

    Config, tokenizer and data that is not streamed are here already, as nothing could be planned without them.
    """
    return tuple(_missing(inputs, kernel, environment))


def _missing(inputs: PlanInputs, kernel: str | None, environment: Mapping[str, str]) -> Iterator[str]:
    if inputs.model.needs_download:
        yield f"the weights of {inputs.model.repository}"
    listed = (*inputs.request.files, *inputs.request.eval_files)
    remote = {
        file.hub.partition("@")[0].removeprefix("hf://datasets/") for file in listed if file.is_remote and file.hub
    }
    if remote:
        yield f"the data of {', '.join(sorted(remote))}"
    if kernel is not None and not has_kernel(kernel, environment):
        yield f"the kernel {kernel}"
