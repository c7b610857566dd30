"""A run's plan, changed so that its model is built to be used rather than trained, on the device at hand."""

from pathlib import Path

from msgspec.structs import replace

from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Plan
from trainer.spec.strategy import Attention, Checkpointing, LossHead, Offload, Precision, Sharding


def read_plan(run_dir: Path) -> Plan:
    """The plan of what ran last: of the newest attempt, which may be another than the run began with."""
    if not (run_dir / "plan.json").is_file():
        raise InputError(f"{run_dir}: is not a run directory: it has no plan.json")
    numbers = [int(path.parent.name) for path in run_dir.glob("attempts/*/plan.json") if path.parent.name.isdigit()]
    newest = run_dir / "attempts" / str(max(numbers)) / "plan.json" if numbers else run_dir / "plan.json"
    return _with_own_code(codec.read(newest, Plan), run_dir)


def _with_own_code(plan: Plan, run_dir: Path) -> Plan:
    """The plan with its model's code where the run has it now; the folder of a run may have been moved."""
    if plan.model_code is None:
        return plan
    kept = run_dir / "model_code" / Path(plan.model_code.folder).name
    return replace(plan, model_code=replace(plan.model_code, folder=str(kept.absolute())))


def plan_on(plan: Plan, device_kind: DeviceKind, *, precision: Precision | None = None) -> Plan:
    """The same model on one device: no engine, nothing recomputed, compiled or offloaded, torch's own attention.

    `precision` decides the type that a frozen base is held in.
    """
    chosen = plan.chosen
    strategy = replace(
        chosen.strategy,
        sharding=Sharding.NONE,
        offload=Offload.NONE,
        precision=precision or chosen.strategy.precision,
    )
    single = replace(
        chosen,
        strategy=strategy,
        num_ranks=1,
        checkpointing=Checkpointing.NONE,
        checkpoint_every_n=None,
        attention=Attention.EAGER if chosen.attention is Attention.EAGER else Attention.SDPA,
        flash_kernel=None,
        loss=LossHead.EAGER,
        loss_chunk_tokens=None,
        compile=False,
        activation_offload=False,
    )
    return replace(plan, candidates=(single,), device_kind=device_kind)
