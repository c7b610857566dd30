"""The C compiler that Triton's kernels need on the machine that runs them: those of torch.compile and of Liger.

In a process's first launch Triton compiles its binding to the driver, with $CC, gcc or clang and against Python.h
(triton 3.7.1, runtime/build.py and backends/nvidia/driver.py). Images with CUDA's runtime alone have neither.
"""

import os
import shutil
import subprocess
import sys
import sysconfig

from trainer.spec.errors import EnvironmentFaultError


def check_triton_compiler(setting: str) -> None:
    """EnvironmentFaultError, after the setting that asks for Triton, where its binding cannot be compiled."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if compiler is None or shutil.which(compiler) is None:
        missing, debian, fedora = f"there is no C compiler ({compiler or 'gcc'})", "gcc", "gcc"
    elif not _finds_python(compiler):
        missing, debian, fedora = "Python's headers are missing (Python.h)", f"python{version}-dev", "python3-devel"
    else:
        return
    raise EnvironmentFaultError(
        f"{setting}: Triton compiles its binding to the driver here, and {missing}\n"
        f"leave {setting} out, or apt install {debian} (Debian, Ubuntu) or dnf install {fedora} (Fedora, RHEL)"
    )


def _finds_python(compiler: str) -> bool:
    argv = [compiler, "-x", "c", "-", "-fsyntax-only", f"-I{sysconfig.get_paths()['include']}"]
    answer = subprocess.run(argv, input="#include <Python.h>\n", text=True, capture_output=True, check=False)
    return answer.returncode == 0
