"""What a failure of `nvidia-smi` means and what mends it. Pure: its text and exit code in, sentences out.

The program writes its errors to stdout or stderr, and its exit codes differ from version to version: the words decide.
"""

from trainer.spec.value import Value


class Failure(Value, frozen=True, kw_only=True):
    """Why nvidia-smi gave no cards, and what would do; `proves_gpu`: such a failure happens only where a card is."""

    sentence: str
    proves_gpu: bool


_FAILURES = (
    (
        "Driver/library version mismatch",
        "the NVIDIA kernel module and the driver's libraries have different versions, as after a driver update\n"
        "restart the machine, or unload and load the kernel module: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset"
        " nvidia && sudo modprobe nvidia",
        True,
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "the NVIDIA kernel module is not loaded\n"
        "load it with: sudo modprobe nvidia; after a kernel update install the driver again (its module was built for"
        " the old kernel), and with Secure Boot on enrol its key",
        False,
    ),
    (
        "GPU access blocked by the operating system",
        "Windows does not let WSL use the GPU\n"
        "install the current NVIDIA driver in Windows, run `wsl --update` and `wsl --shutdown` there, and start again",
        True,
    ),
    (
        "Insufficient Permissions",
        "this user may not open the NVIDIA devices\n"
        "see `ls -l /dev/nvidia*`, and join the group that owns them: sudo usermod -aG video $USER, then log in again",
        True,
    ),
    (
        "Failed to initialize NVML: Unknown Error",
        "the container has lost its access to the GPU\nrestart the container",
        True,
    ),
    (
        "libnvidia-ml.so",
        "the driver's libraries are not here\n"
        "in a container, start it with access to the GPU (docker run --gpus all, apptainer exec --nv);"
        " elsewhere install the NVIDIA driver again",
        False,
    ),
    (
        "Unable to determine the device handle",
        "a GPU no longer answers\nrestart the machine; `sudo dmesg | grep -i xid` says what happened to the card",
        True,
    ),
    (
        "GPU is lost",
        "a GPU no longer answers\nrestart the machine; `sudo dmesg | grep -i xid` says what happened to the card",
        True,
    ),
    (
        "No devices were found",
        "the NVIDIA driver is there but gives this session no GPU\n"
        "under Slurm ask for one (--gpus 1); in a container give it one (--gpus all);"
        " elsewhere see `sudo dmesg | grep NVRM`",
        False,
    ),
)  # fmt: skip


def explain_failure(output: str, exit_code: int | None) -> Failure:
    """What a failed `nvidia-smi` means; `exit_code` None: it did not end in time."""
    if exit_code is None:
        return Failure(
            sentence="nvidia-smi does not answer\n"
            "the driver hangs: `sudo dmesg | grep -i xid` says why, and restarting the machine mends it",
            proves_gpu=False,
        )
    for fragment, meaning, proves_gpu in _FAILURES:
        if fragment in output:
            return Failure(sentence=f"nvidia-smi fails: {meaning}", proves_gpu=proves_gpu)
    first = next(filter(None, map(str.strip, output.splitlines())), "it printed nothing")
    return Failure(
        sentence=f"nvidia-smi fails with exit code {exit_code}: {first}\nrun `nvidia-smi` by hand and mend the driver",
        proves_gpu=False,
    )
