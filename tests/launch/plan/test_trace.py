"""Plans of a model without a closed form: a worker traces its blocks once, and the cache keeps the traces."""

import json
from pathlib import Path

import pytest
from architecture_factory import TINY
from block_kinds import KINDS
from msgspec.structs import replace
from workplace_factory import Workplace, make_workplace

from shardwise.launch.inputs.model_files import known_models
from shardwise.launch.plan.dry_run import simulate, simulation_request
from shardwise.launch.plan.gather import PlanInputs, plan_inputs, profile_data, read_inputs, with_job
from shardwise.launch.plan.trace import announce
from shardwise.trainer.planning.candidates import configuration_of
from shardwise.trainer.planning.memory import needed_bytes
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.certainty import not_compared
from shardwise.trainer.planning.search.configurations import compiles
from shardwise.trainer.planning.search.traced_blocks import with_kernels
from shardwise.trainer.planning.simulated import longest_row
from shardwise.trainer.planning.speed.step import step_seconds
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.model.readers import furthest_forms, read_model_shape, supported_model_types
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("traces"))


def read(
    workplace: Workplace, config: dict[str, object], *settings: str, needs_costs: bool = True,
    traced: ModelShape | None = None,
) -> PlanInputs:  # fmt: skip
    (workplace.folder / "model" / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace.folder)
        return read_inputs(
            workplace.job, ["data.packing=false", "train.seq_len=256", *settings],
            hardware_spec="1xRTX-4090", only_plans=True, needs_costs=needs_costs, traced=traced,
            environment=workplace.environment,
        )  # fmt: skip


def plan_of(workplace: Workplace, inputs: PlanInputs) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace.folder)
        return plan_inputs(inputs, profile_data(inputs), environment=workplace.environment)


def cached(workplace: Workplace) -> list[Path]:
    return sorted((workplace.folder / "cache" / "traces").glob("*.json"))


def test_an_unknown_type_is_planned_from_traces_that_the_cache_keeps(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    config, before = KINDS["linear attention, dense"], set(cached(workplace))
    announce.cache_clear()
    inputs = read(workplace, config, "data.packing=auto")
    assert capsys.readouterr().err.count("tracing one block of each kind of qwen3_5_text") == 1
    assert announce.cache_info().hits == 0, "traced once"
    other = read(workplace, config, "train.seq_len=128", traced=inputs.shape)
    assert other.shape == inputs.shape and capsys.readouterr().err == "", "of other rows nothing is traced again"
    assert inputs.request.packing is False and inputs.shape.packing_obstacle is not None
    made = set(cached(workplace)) - before  # also for a job that says that it does not pack
    assert read(workplace, config).shape == inputs.shape and len(made) == 2
    plan = plan_of(workplace, inputs)
    notes, warned = " ".join(plan.notes), " ".join((*plan.notes, *plan.warnings))
    assert "no closed form" in notes and "2 Qwen3_5GatedDeltaNet" in notes
    assert "pip install" in warned and "flash-linear-attention" in warned and "causal-conv1d" in warned
    assert not_compared(context_of(plan), plan.chosen) == "models of type qwen3_5_text"

    context, shape = context_of(plan), plan.model_shape
    assert shape.traced is not None
    fast = replace(shape, traced=with_kernels(shape.traced))  # as with the packages
    configuration = configuration_of(context, plan.chosen)
    assert step_seconds(fast, configuration, context.device) < step_seconds(shape, configuration, context.device)

    for path in made:
        known = codec.decode(path.read_bytes(), ModelShape, origin=str(path))
        codec.write(path, replace(known, packing_obstacle="as it is cached"))
    announce.cache_clear()
    assert read(workplace, config).shape.packing_obstacle == "as it is cached"
    assert "tracing" not in capsys.readouterr().err
    assert set(cached(workplace)) == {*before, *made}


def test_a_command_that_counts_nothing_gets_the_shape_alone_and_a_torn_file_is_made_again(workplace: Workplace) -> None:
    config, before = KINDS["convolution"], set(cached(workplace))
    shape = read(workplace, config, needs_costs=False).shape
    assert shape.is_described and shape.traced is None and not shape.has_form
    (path,) = set(cached(workplace)) - before
    path.write_bytes(path.read_bytes()[:100])
    assert read(workplace, config, needs_costs=False).shape == shape
    assert codec.decode(path.read_bytes(), ModelShape, origin=str(path)) == shape


def test_a_closed_form_that_is_off_counts_what_is_not_run_as_traced_and_all_time(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts of Mixtral: its form is more than 2 % off, so that plain blocks are traced."""
    config = {**TINY["mixtral"], "max_position_embeddings": 512}
    chats = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
    (workplace.folder / "chats.jsonl").write_text(f"{chats}\n" * 50)
    few = ("data.packing=auto", "data.train=chats.jsonl", "data.chat_template=plain")
    announce.cache_clear()
    form, inputs = read_model_shape(config), read(workplace, config, *few)
    assert inputs.request.packing is False and capsys.readouterr().err.count("tracing") == 1
    assert announce.cache_info().hits == 0, "traced once"
    assert inputs.shape == replace(form, traced=inputs.shape.traced) and inputs.shape.traced is not None
    plan = plan_of(workplace, inputs)
    share = f"{furthest_forms()['mixtral']:.1%}"
    assert any(share in note and "mixtral" in note for note in plan.notes)
    context = context_of(plan)
    plain = replace(configuration_of(context, plan.chosen), compile=False, fused_kernels=False)
    compiled = replace(plain, compile=True)
    device = context.device
    assert needed_bytes(inputs.shape, compiled, device) == needed_bytes(form, compiled, device)
    assert needed_bytes(inputs.shape, plain, device) != needed_bytes(form, plain, device)
    assert step_seconds(inputs.shape, plain, device) == step_seconds(form, plain, device)
    assert compiles(context) == (False, True)


def test_blocks_are_traced_for_the_methods_of_the_job_and_anew_for_a_step_that_changes_it(workplace: Workplace) -> None:
    inputs = read(workplace, KINDS["convolution"], "train.method=full")
    job, traced = inputs.resolved.job, inputs.shape.traced
    assert traced is not None and {run.mode.method for run in traced.modes} == {Method.FULL}
    adapted = replace(job, train=replace(job.train, method=Method.LORA, lora=replace(job.train.lora, rank=4)))
    traced = with_job(inputs, adapted).shape.traced
    assert traced is not None and {run.mode.method for run in traced.modes} == {Method.LORA}
    (sizes,) = {tuple(each.num_elements for each in run.adapters[0]) for run in traced.modes}
    assert sum(sizes) % 4 == 0 and sum(sizes) > 0


CURRENT = [model.name for model in known_models() if model.config["model_type"] not in supported_model_types()]


@pytest.mark.long
@pytest.mark.products
@pytest.mark.parametrize("name", CURRENT)
def test_a_current_model_is_planned_by_name_within_2_percent_of_a_dry_run_of_the_whole_model(
    name: str, tmp_path: Path
) -> None:
    (hub,) = (model.hub[0] for model in known_models() if model.name == name)
    environment = {"HOME": str(tmp_path)}
    inputs = read_inputs(
        None, [f"model.name={hub}", "pin.sharding=fsdp", "train.seq_len=2048"], hardware_spec="256xB300",
        only_plans=True, assumes_data=True, environment=environment,
    )  # fmt: skip
    plan = plan_inputs(inputs, profile_data(inputs), environment=environment)
    assert inputs.shape.traced is not None and inputs.shape.loss_obstacle is None
    simulation = simulate(replace(simulation_request(plan), seq_len=longest_row(plan, plan.chosen)))
    memory = plan.chosen.memory
    peak = memory.peak_allocated_bytes - memory.parts.get("workspace", 0)
    assert peak == pytest.approx(simulation.peak_allocated_bytes, rel=0.02)
