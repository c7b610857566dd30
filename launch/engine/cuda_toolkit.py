"""The CUDA toolkit that torch's extensions are compiled with, found where torch looks for it.

Of what DeepSpeed compiles for a run only `async_io` needs one, and only on a GPU: its builder asks nvcc for its
version, adds the toolkit's headers and links libcudart and libcuda (deepspeed 0.19.8, op_builder/async_io.py and
`jit_load` in builder.py). `cpu_adam` takes the builder of the CPU on every device (accelerator/cuda_accelerator.py).
A build at run time does not compare versions: `assert_no_cuda_mismatch` belongs to builds ahead of time.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from launch.probe.program import ask
from trainer.spec.value import Value

INSTALL = (
    "install the CUDA toolkit (nvcc) of torch's CUDA version and set CUDA_HOME, or leave out allow: [offload_nvme]"
)
_TIMEOUT_S = 5.0


class Toolkit(Value, frozen=True, kw_only=True):
    """A toolkit's folder and its version, or why there is none that compiles."""

    home: Path | None = None
    release: str | None = None  # `13.0`
    problem: str | None = None

    @property
    def link_flags(self) -> tuple[str, ...]:
        """The libraries that DeepSpeed links on a GPU, and where it looks for them."""
        return (f"-L{self.home}", f"-L{self.home}/lib64", "-lcuda", "-lcudart")


def read_toolkit(environment: Mapping[str, str], root: Path = Path("/")) -> Toolkit:
    """The toolkit of CUDA_HOME or CUDA_PATH, of the nvcc on PATH, or /usr/local/cuda, in torch's order."""
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    on_path, usual = shutil.which("nvcc", path=environment.get("PATH")), root / "usr/local/cuda"
    if named:
        home = Path(named)
    elif on_path is not None:
        home = Path(on_path).parent.parent
    elif usual.exists():
        home = usual
    else:
        return Toolkit(problem="there is no nvcc")
    nvcc = home / "bin/nvcc"
    answer = ask([str(nvcc), "--version"], environment=environment, timeout_s=_TIMEOUT_S)
    release = re.search(r"release (\d+\.\d+)", answer.output)
    if release is not None:
        return Toolkit(home=home, release=release[1])
    return Toolkit(home=home, problem=answer.obstacle or f"{nvcc} does not report its version: {answer.last_words}")
