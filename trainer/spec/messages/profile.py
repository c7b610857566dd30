"""Request and result of a profile of one step."""

from shardwise.trainer.spec.value import Value

PROFILE_FOLDER = "profile"  # of a run directory
FIGURES_FILE = "profile.json"


class ProfileRequest(Value, frozen=True, kw_only=True):
    """Have rank 0 run the last step under torch's profiler."""

    num_modules: int = 12  # that are named, those that keep most first
    num_operators: int = 12  # those that take longest first


class KeptBytes(Value, frozen=True, kw_only=True):
    """Bytes that a module allocated in the forward of one micro batch and that are alive at its end."""

    module: str  # its path in the model; empty: outside of all modules
    place: str  # in words: transformer block 3, mlp.down_proj
    num_bytes: int


class OperatorTime(Value, frozen=True, kw_only=True):
    """An operator of torch, over all of its calls in the step."""

    name: str
    num_calls: int
    seconds: float  # its own, without what it calls; of the device, where that is a GPU


class ProfileFigures(Value, frozen=True, kw_only=True):
    """One step of one rank, seen by torch's profiler; times of a step that is profiled are longer than others."""

    step: int
    step_s: float
    kept_bytes: int  # alive at the end of the first forward that was not before it
    kept: tuple[KeptBytes, ...]
    kept_in_all_blocks: tuple[KeptBytes, ...]  # by the name within a block, over all of them
    operators: tuple[OperatorTime, ...]
    files: dict[str, str]  # name: what it is
