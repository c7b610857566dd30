"""The dry run of a plan by a worker, and `plan --simulate`."""

import json
import re

import pytest
from architecture_factory import VARIANTS
from engine_plan_factory import TINY_LLAMA, engine_plan
from msgspec.structs import replace
from planning_factory import data_of, job_of, plan_of
from workplace_factory import make_workplace

from shardwise.launch.plan import dry_run
from shardwise.launch.plan.gather import make_request, read_inputs
from shardwise.launch.terminal import Console
from shardwise.trainer.planning import simulated
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputError, NothingFitsError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import DataFormat, Job, LoraJob, TrainJob
from shardwise.trainer.spec.messages.worker_requests import Simulation, SimulationRequest
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Method, Precision
from shardwise.trainer.spec.units import GIB, MIB

TINY = SimulationRequest(model_config=TINY_LLAMA, seq_len=64)


def test_a_request_goes_out_and_its_answer_or_one_line_on_what_is_wrong_comes_back() -> None:
    simulation = dry_run.simulate(TINY)
    assert sum(simulation.parts.values()) == simulation.peak_allocated_bytes
    assert sum(group.num_bytes for group in simulation.live) == simulation.peak_allocated_bytes
    assert "attention: flash" in simulation.checks
    assert simulation.versions["torch"]
    with pytest.raises(InputError, match=r"llama.*65.*4") as raised:
        dry_run.simulate(replace(TINY, model_config={**TINY_LLAMA, "hidden_size": 65}))
    assert "\n" not in str(raised.value)


def test_the_request_is_what_the_candidate_says() -> None:
    plan = engine_plan(
        Sharding.FSDP, num_ranks=8, precision=Precision.BF16_MIXED, kind=DeviceKind.CUDA, method=Method.LORA,
        job=Job(train=TrainJob(lora=LoraJob(rank=4))), checkpointing=Checkpointing.FULL, attention=Attention.FLASH,
    )  # fmt: skip
    request = dry_run.simulation_request(plan)
    assert request.attention is Attention.SDPA  # flash-attn has no dry run
    assert (request.lora.rank, request.method, request.sharding) == (4, Method.LORA, Sharding.FSDP)
    assert (request.num_ranks, request.device_name) == (8, "NVIDIA H100")
    assert (request.micro_batch, request.accumulation, request.seq_len) == (4, 2, 128)
    assert request.model_config == plan.model_config


def simulation_like(plan: Plan, *, factor: float = 1) -> Simulation:
    """A dry run that comes to what the closed form says of the chosen candidate, or to a multiple of it."""
    memory = plan.chosen.memory
    workspace = memory.parts.get("workspace", 0)
    events = {name: size - (workspace if name != "load" else 0) for name, size in memory.events.items()}
    events = {name: round(factor * size) for name, size in events.items()}
    peak = events[memory.peak_event]
    return Simulation(
        steady_allocated_bytes=memory.steady_allocated_bytes - workspace, peak_allocated_bytes=peak,
        peak_event=memory.peak_event, events=events, parts={"weights": peak}, live=(),
        peak_reserved_bytes=peak + 64 * MIB, expandable_reserved_bytes=peak + 40 * MIB,
        min_capacity_bytes=peak + 20 * MIB, checks=(), num_parameters=plan.model_shape.num_parameters,
        num_trained_parameters=plan.model_shape.num_parameters, seconds=1.0, versions={},
    )  # fmt: skip


def test_each_event_and_part_is_compared_without_the_workspaces_that_no_dry_run_sees() -> None:
    plan = plan_of("1b", "1xRTX-4090")
    memory, simulation = plan.chosen.memory, simulation_like(plan, factor=0.8)
    between = {"block_backward_middle": simulation.peak_allocated_bytes, "new_event": GIB}
    simulation = replace(simulation, events={**between, **simulation.events}, parts={"weights": 2 * GIB})
    rows = {line[:24].rstrip(): line[24:].split() for line in dry_run.describe_simulation(simulation, memory)}
    same = memory.events.keys() - {"block_backward_top"}
    assert {rows[name][-1] for name in (*same, "peak")} == {"-20.00%"} and "load" in same
    expected = memory.events["block_backward_top"] - memory.parts["workspace"]
    difference = f"{simulation.peak_allocated_bytes / expected - 1:+.2%}"
    assert rows["block_backward_top"][-1] == difference, "the blocks between count with the last"
    assert (rows["new_event"][0], rows["new_event"][-1]) == ("-", "-")
    assert rows["between steps"][-1] == "+0.00%"
    reserved = memory.peak_reserved_bytes - memory.parts["workspace"]
    assert rows["reserved"][-1] == f"{simulation.expandable_reserved_bytes / reserved - 1:+.2%}"
    assert rows["  weights"][-1] == f"{2 * GIB / memory.parts['weights'] - 1:+.2%}"


@pytest.mark.parametrize("machine", ["1xRTX-4090", "8xH100-SXM5-80GB"])
@pytest.mark.parametrize("model", ["tiny", "1b"])
def test_bytes_that_are_the_closed_forms_need_what_the_closed_form_needs(model, machine):
    plan = plan_of(model, machine)
    simulation = simulation_like(plan)
    memory = simulated.simulated_memory(context_of(plan), plan.chosen, simulation)
    expected = plan.chosen.memory
    assert (memory.need_bytes, memory.events) == (expected.need_bytes, expected.events)
    assert memory.peak_allocated_bytes == expected.peak_allocated_bytes == sum(memory.parts.values())
    assert memory.steady_allocated_bytes == expected.steady_allocated_bytes
    workspace = expected.parts["workspace"]
    assert memory.peak_reserved_bytes == simulation.expandable_reserved_bytes + workspace
    plain = replace(plan, hardware=replace(plan.hardware, can_expand_segments=False))
    memory = simulated.simulated_memory(context_of(plain), plan.chosen, simulation)
    assert memory.peak_reserved_bytes == simulation.peak_reserved_bytes + workspace
    most = 2 * simulation.peak_allocated_bytes
    between = replace(simulation, events={**simulation.events, "clip": most})  # counts with the event before it
    memory = simulated.simulated_memory(context_of(plan), plan.chosen, between)
    assert memory.events["optimizer_step"] == most + workspace
    assert memory.need_bytes > 1.5 * expected.peak_allocated_bytes


def described(plan: Plan) -> Plan:
    """The same plan as if no reader knew the model."""
    return replace(plan, model_shape=replace(plan.model_shape, is_described=True))


def test_only_an_unknown_architecture_takes_its_memory_from_the_dry_run():
    known = plan_of("1b", "1xRTX-4090")
    memory = simulated.simulated_memory(context_of(known), known.chosen, simulation_like(known, factor=0.9))
    for plan, expected in ((known, known.chosen.memory), (described(known), memory)):
        taken = simulated.plan_of_simulated(plan, simulated.Simulated(candidate=plan.chosen, memory=memory), [])
        assert taken.chosen.memory == expected and taken.fallbacks == plan.fallbacks
        assert any("no closed form" in note for note in taken.notes) == plan.model_shape.is_described


def as_predicted(candidate: Candidate) -> simulated.Simulated:
    return simulated.Simulated(candidate=candidate, memory=candidate.memory)


def test_a_fallback_that_is_taken_leaves_the_ones_behind_it_and_another_candidate_has_its_own():
    plan = plan_of("1b", "1xRTX-4090")
    decided = simulated.plan_of_simulated(plan, as_predicted(plan.fallbacks[1]), [as_predicted(plan.chosen)])
    assert decided.chosen == replace(plan.fallbacks[1], reasons=decided.chosen.reasons)
    assert f"micro batch {decided.chosen.micro_batch}: " in decided.chosen.reasons[2]
    assert decided.fallbacks == plan.fallbacks[2:]
    assert plan.chosen not in decided.candidates
    assert any(plan.chosen.strategy.name in note and "micro batch" in note for note in decided.notes)
    plan = plan_of("1b", "8xH100-SXM5-80GB")
    other = next(each for each in plan.candidates if each.strategy.sharding is not plan.chosen.strategy.sharding)
    decided = simulated.plan_of_simulated(plan, as_predicted(other), [as_predicted(plan.chosen)])
    assert decided.chosen.strategy == other.strategy and decided.fallbacks != plan.fallbacks
    assert all(each.strategy != plan.chosen.strategy for each in decided.candidates)
    (rejection,) = [each for each in decided.rejections if each.strategy == plan.chosen.strategy.name]
    assert "dry run" in rejection.reason


@pytest.mark.parametrize(
    ("change", "fact"),
    [({"sharding": Sharding.ZERO3}, "zero3"), ({"offload": Offload.OPTIMIZER}, "offload"), ({}, None)],
)
def test_what_a_dry_run_cannot_run_is_named(change, fact):
    plan = plan_of("tiny", "8xH100-SXM5-80GB")
    candidate = replace(plan.chosen, strategy=replace(plan.chosen.strategy, **change))
    obstacle = simulated.obstacle_to_dry_run(candidate, plan.model_shape, is_cpu=False)
    assert obstacle is None if fact is None else fact in (obstacle or "")


def test_a_plan_without_a_dry_run_stays_as_it_is_and_says_so(capsys):
    plan = plan_of("tiny", "1xRTX-4090")
    plan = replace(plan, candidates=(replace(plan.chosen, checkpointing=Checkpointing.SELECTIVE),))
    taken, (line,) = dry_run.simulated_plan(plan, Console())
    assert taken == plan and "checkpointing selective" in line
    with pytest.raises(InputError, match=r"llama.*checkpointing selective"):
        dry_run.simulated_plan(replace(described(plan), fallbacks=()), Console())


def test_a_dpo_job_is_run_as_pairs_against_its_reference_and_agrees_with_the_closed_form(capsys):
    job = job_of(method=Method.LORA, pin={"micro_batch": 2, "sharding": "none"}, seq_len=512, tokens_per_step=2048)
    data = data_of(seq_len=512, format=DataFormat.PREFERENCE, is_packed=False)
    plan = plan_of("tiny", "1xH100-SXM5-80GB", job=job, data=data)
    assert dry_run.simulation_request(plan).rows_per_example == 2
    taken, lines = dry_run.simulated_plan(plan, Console())
    assert taken.chosen.method is Method.LORA
    differences = {line[:24].strip(): line.split()[-1] for line in lines if line.endswith("%")}
    assert abs(float(differences["peak"].removesuffix("%"))) < 1
    assert abs(float(differences["between steps"].removesuffix("%"))) < 1  # tensors of a tiny model are rounded up


def test_a_compiled_candidate_is_dry_run_eagerly_and_needs_less_by_what_compilation_saves():
    plan = plan_of("1b", "1xRTX-4090", pin={"compile": True, "sharding": Sharding.NONE})
    context, compiled = context_of(plan), plan.chosen
    eager = simulated.eager_candidate(context, compiled)
    assert not eager.compile and eager.memory.need_bytes > compiled.memory.need_bytes
    assert simulated.obstacle_to_dry_run(compiled, plan.model_shape, is_cpu=False) is None
    same = simulated.compiled_memory(eager.memory, eager.memory, compiled.memory)
    assert (same.need_bytes, same.events) == (compiled.memory.need_bytes, compiled.memory.events)
    assert sum(same.parts.values()) == same.peak_allocated_bytes
    more = replace(eager.memory, need_bytes=eager.memory.need_bytes + GIB)
    assert simulated.compiled_memory(more, eager.memory, compiled.memory).need_bytes == compiled.memory.need_bytes + GIB


def test_a_dry_run_that_does_not_fit_ends_the_plan_of_that_machine(capsys):
    plan = plan_of("tiny", "1xRTX-4090", seq_len=512, tokens_per_step=512)
    hardware = replace(plan.hardware, vram_cap_bytes=100 * MIB)
    small = replace(plan, hardware=hardware, candidates=(plan.chosen,), fallbacks=())
    other = replace(plan, candidates=(replace(plan.chosen, checkpointing=Checkpointing.SELECTIVE),))
    answers, lines = dry_run.simulated_results([("small", small), ("other", other)], Console())
    error = str(dict(answers)["small"])
    assert isinstance(dict(answers)["small"], NothingFitsError)
    assert re.match(r".* needs .*; 100 MiB .*\n", error) and "would fit with shorter" in error
    assert (dict(answers)["other"], list(lines)) == (other, ["other"])


def test_a_model_that_does_not_pack_leaves_packing_off_or_refuses_it(tmp_path, monkeypatch):
    """Where the reason is the lack of a measurement, a job that packs is let through to that before its first step."""
    workplace = make_workplace(tmp_path)
    (workplace.folder / "model" / "config.json").write_text(json.dumps(VARIANTS["falcon rw"]))
    monkeypatch.chdir(workplace.folder)
    inputs = read_inputs(workplace.job, ["data.packing=auto"], environment=workplace.environment)
    assert inputs.request.packing is False
    with pytest.raises(
        InputError, match=r"data\.packing: falcon does not pack: its ALiBi .*;\ngive data\.packing=false"
    ):
        read_inputs(workplace.job, ["data.packing=true"], environment=workplace.environment)
    job, shape = inputs.resolved.job, replace(inputs.shape, is_packing_measured=False)
    packs = replace(job, data=replace(job.data, packing=True))
    assert make_request(packs, shape=shape, tokenizer_path=None, cache_root=tmp_path, only_plans=True).packing
