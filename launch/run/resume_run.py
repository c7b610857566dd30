"""What a run that is resumed goes on with: the plan it had, or a new one that its last checkpoint fits."""

from pathlib import Path

from msgspec.structs import replace

from launch.inputs.prepare_data import refuse_other_stream
from launch.plan.checkpoint_fit import newest_facts, obstacle_to_resume
from launch.terminal import Console
from trainer.planning.planner import take_candidate
from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.hardware import Hardware
from trainer.spec.plan import Plan
from trainer.spec.report import Ending, Report


def refuse_other_run(run_dir: Path, plan: Plan, earlier: Plan) -> None:
    """InputError where the run trained another model, or on other data."""
    refuse_other_stream(run_dir, plan.data, earlier.data)
    changed = [
        f"--resume: {run_dir} trained another {what}: {then!r}, this job has {now!r}; start it without --resume"
        for what, then, now in (
            ("model", _model_name(earlier), _model_name(plan)),
            ("dataset", earlier.data.fingerprint, plan.data.fingerprint),
        )
        if then != now
    ]
    if not changed and earlier.model_config != plan.model_config:
        keys = sorted(
            key
            for key in earlier.model_config.keys() | plan.model_config.keys()
            if earlier.model_config.get(key) != plan.model_config.get(key)
        )
        changed = [
            f"--resume: {run_dir} trained another model: {keys[0]} was {earlier.model_config.get(keys[0])!r}, "
            f"this job has {plan.model_config.get(keys[0])!r}; start it without --resume"
        ]
    if changed:
        raise InputError("\n".join(changed))


def _model_name(plan: Plan) -> str:
    return plan.job.model.name or plan.job.model.config or "unnamed"


def finished_report(run_dir: Path, plan: Plan, earlier: Plan) -> Report | None:
    """The report of a run that has nothing left to do."""
    path = run_dir / "report.json"
    if not path.is_file():
        return None
    report = codec.read(path, Report)
    is_done = report.ending is Ending.FINISHED and report.step >= plan.schedule.num_steps
    return report if is_done and earlier.schedule == plan.schedule else None


def plan_to_resume(plan: Plan, earlier: Plan, run_dir: Path, console: Console, *, may_choose: bool) -> Plan:
    """The earlier plan while job and hardware are unchanged; otherwise the new one, and what changed.

    Where the run's last checkpoint cannot be gone on from under what the new plan has chosen, the best of its
    candidates under which it can; InputError where there is none, or none may be chosen.
    """
    changes = describe_changes(plan, earlier)
    if not changes:
        can_expand = plan.hardware.can_expand_segments  # as tried just now: an update of the driver may change it
        return replace(earlier, hardware=replace(earlier.hardware, can_expand_segments=can_expand))
    console.line("resuming with a new plan, because " + "; ".join(changes))
    saved = newest_facts(run_dir)
    obstacles = [obstacle_to_resume(saved, candidate) for candidate in plan.candidates]
    if obstacles[0] is None:
        return plan
    name = plan.chosen.strategy.name
    if may_choose and None in obstacles:
        number = obstacles.index(None) + 1
        console.line(f"{name} {obstacles[0]}; going on under candidate {number}")
        return take_candidate(plan, number)
    of_all = "" if not may_choose else f", nor can another of the {len(plan.candidates)} candidates"
    raise InputError(
        f"--resume: {run_dir}: {name} {obstacles[0]}{of_all};\n"
        "undo the change, pin what was saved, or export the run and start from that model without --resume"
    )


def describe_changes(plan: Plan, earlier: Plan) -> list[str]:
    """What differs between the job and the machine of two plans, in words; free memory is no difference."""
    changes = [
        f"{section} changed in the job"
        for section in plan.job.__struct_fields__
        if getattr(plan.job, section) != getattr(earlier.job, section)
    ]
    if _extension_key(plan) != _extension_key(earlier):
        changes.append("the extensions file changed")
    if _code_key(plan) != _code_key(earlier):
        changes.append("the model's code changed")
    then, now = _machine_key(earlier.hardware), _machine_key(plan.hardware)
    return changes + [f"{name} was {then[name]}, is {now[name]}" for name in then if then[name] != now[name]]


def _extension_key(plan: Plan) -> str | None:
    return None if plan.extension is None else plan.extension.sha256


def _code_key(plan: Plan) -> dict[str, str] | None:
    return None if plan.model_code is None else plan.model_code.files


def _machine_key(hardware: Hardware) -> dict[str, object]:
    return {
        "number of nodes": hardware.num_nodes,
        "GPUs": ", ".join(gpu.name for gpu in hardware.gpus) or "none",
        "number of CPU devices": hardware.num_cpu_devices,
        "memory cap": hardware.vram_cap_bytes,
        "RAM": hardware.host.ram_bytes,
        "cores": hardware.host.num_cores,
    }
