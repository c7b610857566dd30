"""Piece `peers`: all are told the same, steps are timed alike and apart, and what is not equal is not called level."""

import ast
import json
import statistics
import sys
import tomllib
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from msgspec.structs import replace
from on_gpu import peers, peers_run, peers_table, peers_trainers
from on_gpu.goals import Standing
from on_gpu.peers_configs import TORCHTITAN_FLAVORS, axolotl_config, llamafactory_config, pinned_job, torchtitan_config
from on_gpu.peers_contests import BETAS, CONTESTS, LORA_ALPHA, LORA_RANK, Contest, PeerJob
from on_gpu.peers_run import PeerError, TrainerRun, train_alone, train_in_turns
from on_gpu.peers_scripts import bare_script, transformers_script, trl_script, unsloth_script
from on_gpu.peers_table import LEVEL, SKIPPED
from on_gpu.peers_trainers import BY_NAME, PINNED, PLANNED, SCRIPTS, TRAINERS, Trainer, count_lines, why_not, words_of
from planning_factory import machine

from launch.plan_job import profile_data, read_inputs
from launch.supervisor import StopRequest
from launch.unlimited_plan import plan_regardless
from trainer.runtime.state import SKIPPED_STEPS
from trainer.spec.plan import Plan
from trainer.spec.units import GIB

CALL_S = 540.0  # the minutes of a call of the benchmark
FULL, LORA, QLORA = CONTESTS
LIBRARIES = ("torch", "accelerate", "transformers", "peft", "bitsandbytes")
SCRIPT_WRITERS = (trl_script, transformers_script, bare_script, unsloth_script)
OTHERS = [trainer for trainer in TRAINERS if not trainer.is_ours]


def job_of(contest: Contest, folder: Path, *, is_cuda: bool = True) -> PeerJob:
    """What a trainer is told, of a preset's model and one row."""
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": [5] * contest.seq_len}) + "\n")
    return PeerJob(
        contest=contest,
        seq_len=contest.seq_len,
        num_steps=contest.num_steps,
        model=Path(contest.model),
        model_with_tokenizer=folder / "model",
        rows=rows,
        own_rows=rows,
        folder=folder,
        is_cuda=is_cuda,
    )


def bench(folder: Path, *, card: str = "1xH200") -> SimpleNamespace:
    """What making steps needs of a bench."""
    return SimpleNamespace(work=folder, hardware=machine(card), is_tiny=False, environment={}, device_name="Some H200")


def planned(trainer: Trainer, contest: Contest, folder: Path) -> Plan:
    """The plan of one of shardwise's two job files on a stated H200."""
    file = folder / trainer.file
    file.write_text(trainer.write(job_of(contest, folder)))
    inputs = read_inputs(file, [], hardware_spec="1xH200")
    inputs = inputs._replace(hardware=machine("1xH200", libraries=LIBRARIES))
    return plan_regardless(inputs, profile_data(inputs))


# What the trainers are told.


@pytest.mark.parametrize("contest", CONTESTS, ids=lambda contest: contest.name)
def test_shardwise_trains_with_the_settings_of_the_contest_and_fits(contest: Contest, tmp_path: Path):
    chosen = planned(BY_NAME[PINNED], contest, tmp_path).chosen
    assert chosen.memory.fits
    assert (chosen.method, chosen.strategy.precision) == (contest.method, contest.precision)
    assert (chosen.micro_batch, chosen.accumulation) == (contest.micro_batch, contest.accumulation)
    assert (chosen.checkpointing, chosen.strategy.optimizer, chosen.strategy.sharding) == (
        contest.checkpointing,
        "adamw_fused",
        "none",
    )


@pytest.mark.parametrize("contest", CONTESTS, ids=lambda contest: contest.name)
def test_what_shardwise_chooses_itself_keeps_precision_and_global_batch(contest: Contest, tmp_path: Path):
    plan = planned(BY_NAME[PLANNED], contest, tmp_path)
    assert plan.chosen.strategy.precision == contest.precision
    assert plan.schedule.sequences_per_step == contest.micro_batch * contest.accumulation
    assert plan.job.train.steps == contest.num_steps


def test_shardwise_is_told_nothing_that_is_not_among_its_lines(tmp_path: Path):
    file, clock = tmp_path / "job.yaml", tmp_path
    for name in (PINNED, PLANNED):
        told = words_of(BY_NAME[name], file, clock, {})
        after = told[told.index(str(file)) + 1 :]
        assert after == [f"extensions={clock / 'clock.py'}", "--run-dir", str(tmp_path / "run")]
    text = pinned_job(job_of(FULL, tmp_path))
    assert yaml.safe_load(text)["checkpoint"] == {"every": "100000 steps"}


def test_lines_are_those_that_say_something():
    assert count_lines("import json\n\n# why\n    # and so on\nx = 1  # here\n") == 2
    assert count_lines("a:\n  b: 1\n# c\n\n") == 2


@pytest.mark.parametrize("contest", CONTESTS, ids=lambda contest: contest.name)
@pytest.mark.parametrize("write", SCRIPT_WRITERS, ids=lambda write: write.__name__)
def test_scripts_are_python_that_uses_what_it_imports(write, contest: Contest, tmp_path: Path):
    tree = ast.parse(write(job_of(contest, tmp_path)))
    names = [alias.name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert set(names) <= used and len(set(names)) == len(names)
    assert ("LoraConfig" in used or "FastLanguageModel" in used) or contest.method == "full"


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # older releases know no other name
@pytest.mark.parametrize("contest", CONTESTS, ids=lambda contest: contest.name)
@pytest.mark.parametrize(("write", "kind"), [(trl_script, "SFTConfig"), (transformers_script, "TrainingArguments")])
def test_arguments_are_those_of_the_installed_libraries(write, kind: str, contest: Contest, tmp_path: Path):
    if kind == "SFTConfig":
        from trl import SFTConfig as Settings
    else:
        from transformers import TrainingArguments as Settings
    tree = ast.parse(write(job_of(contest, tmp_path, is_cuda=False)))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    (call,) = (node for node in calls if node.func.id == kind)
    words = {each.arg: ast.unparse(each.value) for each in call.keywords if each.arg is not None}
    quantised = words.pop("model_init_kwargs", "")
    settings = Settings(**{name: ast.literal_eval(value) for name, value in words.items()})
    assert settings.per_device_train_batch_size == contest.micro_batch
    assert settings.gradient_accumulation_steps == contest.accumulation
    assert settings.max_steps == contest.num_steps and settings.learning_rate == contest.lr
    assert (settings.adam_beta1, settings.adam_beta2) == BETAS
    assert settings.bf16 is (contest.precision == "bf16-mixed")
    assert settings.gradient_checkpointing is (contest.checkpointing == "full")
    assert settings.max_grad_norm == 1.0 and settings.weight_decay == 0.0
    assert ("quantization" in quantised) is (contest.method == "qlora" and kind == "SFTConfig")


@pytest.mark.parametrize("contest", CONTESTS, ids=lambda contest: contest.name)
def test_files_of_the_other_programs_say_what_the_contest_says(contest: Contest, tmp_path: Path):
    job = job_of(contest, tmp_path)
    axolotl, factory = (yaml.safe_load(write(job)) for write in (axolotl_config, llamafactory_config))
    for told, micro_batch, optimizer in (
        (axolotl, "micro_batch_size", "optimizer"),
        (factory, "per_device_train_batch_size", "optim"),
    ):
        assert told[micro_batch] == contest.micro_batch and told["max_steps"] == contest.num_steps
        assert told["gradient_accumulation_steps"] == contest.accumulation
        assert told[optimizer] == "adamw_torch_fused" and float(told["learning_rate"]) == contest.lr
    assert axolotl["sequence_len"] == factory["cutoff_len"] == contest.seq_len
    assert axolotl["gradient_checkpointing"] is not factory["disable_gradient_checkpointing"]
    has_adapters = contest.method != "full"
    assert (axolotl.get("lora_r"), axolotl.get("lora_alpha")) == (
        (LORA_RANK, LORA_ALPHA) if has_adapters else (None,) * 2
    )
    assert (factory.get("lora_rank"), factory.get("lora_alpha")) == (axolotl.get("lora_r"), axolotl.get("lora_alpha"))
    assert axolotl.get("load_in_4bit", False) is (factory.get("quantization_bit") == 4) is (contest.method == "qlora")


def test_torchtitan_trains_only_a_model_that_it_has(tmp_path: Path):
    (model, flavor), = TORCHTITAN_FLAVORS.items()  # fmt: skip
    told = tomllib.loads(torchtitan_config(job_of(replace(FULL, model=model), tmp_path)))
    assert told["model"]["flavor"] == flavor and told["training"]["dtype"] == "bfloat16"
    assert told["training"]["global_batch_size"] == FULL.micro_batch * FULL.accumulation
    titan = BY_NAME["torchtitan"]
    assert why_not(titan, job_of(FULL, tmp_path), {}) == "has no llama-3.2-1b"
    assert why_not(titan, job_of(LORA, tmp_path), {}) == "trains no lora"


def test_who_is_not_installed_has_no_part(tmp_path: Path, monkeypatch):
    job = job_of(QLORA, tmp_path)
    nowhere = {"SHARDWISE_PEER_PYTHON_TRL": str(tmp_path / "python")}
    assert why_not(BY_NAME["TRL SFTTrainer"], job, nowhere) == "not installed here"
    assert why_not(BY_NAME["TRL SFTTrainer"], job, {}) is None
    monkeypatch.setitem(peers_trainers.NEEDED, "qlora", ("peft", "no-such-package"))
    assert {why_not(BY_NAME[name], job, {}) for name in (PINNED, "bare loop")} == {
        "no-such-package is not installed here"
    }


def test_a_trainer_has_the_version_of_its_own_package():
    packages = {trainer.name: trainer.package for trainer in TRAINERS}
    assert packages["transformers Trainer"] == "transformers" and packages["TRL SFTTrainer"] == "trl"
    found = peers_trainers.installed_version("torch", sys.executable)
    assert found is not None and found.startswith(torch.__version__.partition("+")[0])
    assert peers_trainers.installed_version("no-such-package", sys.executable) is None


# Steps.


def alone_row(contest: Contest, trainer: str, *, seconds: float = 1.0, is_cuda: bool = True, **more) -> dict:
    """A row of a trainer that ran; its first steps are slow."""
    memory = {"peak_allocated_bytes": 20 * GIB, "peak_reserved_bytes": 30 * GIB}
    tokens = contest.seq_len * contest.micro_batch * contest.accumulation
    return {
        "contest": contest.name,
        "model": contest.model,
        "method": contest.method,
        "precision": contest.precision,
        "checkpointing": contest.checkpointing,
        "seq_len": contest.seq_len,
        "micro_batch": contest.micro_batch,
        "accumulation": contest.accumulation,
        "tokens_per_step": tokens,
        "num_steps": contest.num_steps,
        "is_rehearsal": not is_cuda,
        "device": "Some H200",
        "flops_per_token": 1e9,
        "peak_flops_per_s": 989e12 if is_cuda else None,
        "trainer": trainer,
        "command": f"train {trainer}",
        "version": "1.2",
        "lines": 20,
        "outcome": "ran",
        "seconds": [9.0] * SKIPPED + [seconds] * (contest.num_steps - 1 - SKIPPED),
        "losses": {"1": 6.0, str(contest.num_steps): 5.0},
        "memory": memory if is_cuda else {"peak_resident_bytes": GIB},
        "versions": {"torch": "2.0"},
    } | more


def alone_rows(contest: Contest, seconds: dict[str, float], **more) -> dict[str, dict]:
    return {
        peers.alone_name(contest, BY_NAME[name], 1): alone_row(contest, name, seconds=each, **more)
        for name, each in seconds.items()
    }


def turns_row(contest: Contest, seconds: dict[str, list[float]]) -> dict:
    told = {name: {"seconds": [9.0] * SKIPPED + each} for name, each in seconds.items()}
    return {"contest": contest.name, "outcome": "ran", "trainers": told}


def test_every_trainer_runs_by_rounds_under_a_name_of_its_own_and_within_a_call(tmp_path: Path):
    found = list(peers.steps(bench(tmp_path), {}))
    names = [step.name for step in found]
    assert len(set(names)) == len(names) == len(TRAINERS) * sum(contest.rounds for contest in CONTESTS)
    second = [name for name in names if name.startswith(LORA.name)]
    assert second == [peers.alone_name(LORA, each, number) for number in (1, 2) for each in TRAINERS]
    assert all(step.expected_s <= CALL_S for step in found)
    assert peers_run.START_S < peers_run.RUN_S <= CALL_S


def test_all_trainers_in_turns_are_expected_to_end_within_a_call(tmp_path: Path):
    small = {"peak_allocated_bytes": GIB, "peak_reserved_bytes": GIB}
    done = alone_rows(FULL, {trainer.name: 1.0 for trainer in TRAINERS}, memory=small)
    (turns,) = [step for step in peers.steps(bench(tmp_path), done) if step.name.endswith("in turns")]
    assert turns.expected_s <= CALL_S


def test_turns_are_taken_by_those_that_ran_and_fit_together(tmp_path: Path):
    done = alone_rows(FULL, {PINNED: 1.0, "TRL SFTTrainer": 1.0, "transformers Trainer": 1.0, "bare loop": 1.0})
    done[peers.alone_name(FULL, BY_NAME[PLANNED], 1)] = alone_row(FULL, PLANNED) | {"outcome": "failed"}
    names = [trainer.name for trainer in TRAINERS]
    need = 30 * GIB + peers.CONTEXT_BYTES
    assert peers.fitting(done, FULL, names, room_bytes=3 * need) == (PINNED, "TRL SFTTrainer", "transformers Trainer")
    assert peers.fitting(done, FULL, names, room_bytes=3 * need - 1) == (PINNED, "TRL SFTTrainer")
    assert len(peers.fitting(done, FULL, names, room_bytes=None)) == 4
    assert sum(step.name.endswith("in turns") for step in peers.steps(bench(tmp_path), done)) == 1
    one = alone_rows(FULL, {PINNED: 1.0})
    assert not any(step.name.endswith("in turns") for step in peers.steps(bench(tmp_path), one))


def test_what_is_said_names_no_folder_of_the_machine(tmp_path: Path):
    said = f"{tmp_path}/peers/abc/out and {sys.prefix}/lib/x.py and {peers_trainers.ROOT}/launch/cli.py"
    readable = peers._readable(said, bench(tmp_path))
    assert readable.startswith("WORK/out and PYTHON/lib/x.py")
    assert str(peers_trainers.ROOT) not in readable and str(tmp_path) not in readable


# The clock, with real processes.

LOOP = """
import pathlib, time
for step in range(1, {steps} + 1):
    with pathlib.Path({order!r}).open("a") as file:
        file.write("begin {name}\\n")
    time.sleep(0.01)
    with pathlib.Path({order!r}).open("a") as file:
        file.write("end {name}\\n")
    print(step, 6.0 - step)
"""


def run_of(folder: Path, text: str) -> TrainerRun:
    """A process that runs this script with a clock where it prints."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(text)
    words = [sys.executable, str(SCRIPTS / "with_clock.py"), str(folder), "print", str(script)]
    return TrainerRun(words, folder, environment={}, stop=StopRequest())


def loop(folder: Path, name: str, *, steps: int) -> str:
    return LOOP.format(order=str(folder / "order.txt"), name=name, steps=steps)


def test_a_step_is_timed_from_the_second_on_and_every_loss_is_told(tmp_path: Path):
    trained = train_alone(run_of(tmp_path / "a", loop(tmp_path, "a", steps=4)), num_steps=4)
    assert len(trained.seconds) == 3 and min(trained.seconds) >= 0.01
    assert trained.losses == {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}
    assert trained.memory["peak_resident_bytes"] > 0 and "torch" in trained.versions


def test_in_turns_no_step_runs_beside_another_and_each_goes_first_at_times(tmp_path: Path):
    runs = [run_of(tmp_path / name, loop(tmp_path, name, steps=5)) for name in ("a", "b")]
    train_in_turns(runs, num_steps=5)
    words = [line.split() for line in (tmp_path / "order.txt").read_text().splitlines()]
    assert [kind for kind, _ in words] == ["begin", "end"] * 10
    assert "".join(name for kind, name in words if kind == "begin") == "ab" + "baab" * 2
    assert [len(run.trained.seconds) for run in runs] == [4, 4]


def test_the_extension_of_shardwise_tells_its_steps_to_the_same_clock(tmp_path: Path):
    """As a run calls it: with the metrics of a step, and not before one has ended."""
    clock = tmp_path / "clock"
    clock.mkdir()
    words_of(BY_NAME[PINNED], tmp_path / "job.yaml", clock, {})
    text = "import runpy\non_step = runpy.run_path({!r})['on_step']\n".format(str(clock / "clock.py"))
    text += "for step in (1, 2, 3):\n    on_step(step, {'loss': 4.0 - step, 'memory_peak_bytes': 7})\n"
    script = tmp_path / "run.py"
    script.write_text(text)
    trained = train_alone(
        TrainerRun([sys.executable, str(script)], clock, environment={}, stop=StopRequest()), num_steps=3
    )
    assert trained.losses == {1: 3.0, 2: 2.0, 3: 1.0} and len(trained.seconds) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no such thing')", "ended with 1: ValueError: no such thing"),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate')", "out of memory"),
        ("", "ended with 0: it said nothing"),
    ],
)
def test_a_trainer_that_ends_early_says_why(text: str, said: str, tmp_path: Path):
    with pytest.raises(PeerError) as error:
        train_alone(run_of(tmp_path / "a", text), num_steps=3)
    assert str(error.value) == said


def test_what_hangs_is_ended_with_an_answer(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(peers_run, "STEP_S", 0.2)
    run = run_of(tmp_path / "a", "import time\nprint(1, 2.0)\ntime.sleep(600)")
    with pytest.raises(PeerError, match="no step within 0 s"):
        train_alone(run, num_steps=3)
    assert run._process.returncode is not None


def test_no_run_goes_on_for_longer_than_its_time(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(peers_run, "RUN_S", 0.0)
    run = run_of(tmp_path / "a", loop(tmp_path, "a", steps=4))
    with pytest.raises(PeerError, match="not done within 0 s"):
        train_in_turns([run], num_steps=4)
    monkeypatch.setattr(peers_run, "RUN_S", 540.0)
    train_in_turns([run], num_steps=4)
    assert len(run.trained.seconds) == 3


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer itself, which steps those that it holds."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.optimizers = [torch.optim.SGD(weights, lr=0.1)]
        super().__init__(weights, {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


def test_a_step_of_torchtitan_is_told_once(monkeypatch):
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict())
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "with_clock", raising=False)
    import with_clock

    told: list[int] = []
    with_clock._listen_to_optimizer(SimpleNamespace(end_of_step=told.append))
    container = Container([torch.nn.Parameter(torch.zeros(2))])
    for _ in range(3):
        container.step()
    assert told == [1, 2, 3]


# Tables and goals.


def test_the_first_steps_and_the_one_whose_memory_is_profiled_do_not_count():
    assert SKIPPED_STEPS + 1 <= SKIPPED + 1
    rows = alone_rows(FULL, {PINNED: 2.0, "bare loop": 1.0})
    ours = next(each for each in peers_table.figures_of(FULL.name, rows) if each.trainer == PINNED)
    assert ours.tokens_per_s == FULL.seq_len * FULL.micro_batch * FULL.accumulation / 2.0
    assert ours.mfu == pytest.approx(ours.tokens_per_s * 1e9 / 989e12) and ours.loss == 5.0


def test_of_several_rounds_speed_is_the_median_and_memory_the_most():
    rows = {
        peers.alone_name(LORA, BY_NAME[PINNED], number): alone_row(
            LORA, PINNED, seconds=seconds, memory={"peak_allocated_bytes": number * GIB}
        )
        for number, seconds in ((1, 1.0), (2, 2.0))
    }
    (found,) = peers_table.figures_of(LORA.name, rows)
    tokens = LORA.seq_len * LORA.micro_batch
    assert found.tokens_per_s == statistics.median([tokens / 1.0, tokens / 2.0])
    assert found.peak_bytes == 2 * GIB


def test_in_turns_steps_are_compared_with_those_beside_them():
    row = turns_row(FULL, {PINNED: [1.0, 10.0, 1.0], "bare loop": [0.5, 5.0, 2.0]})
    turns = peers_table.ratios_in_turns(FULL.name, {"in turns": row})
    assert turns == {PINNED: 1.0, "bare loop": 2.0}
    no_pinned = turns_row(FULL, {PLANNED: [1.0], "bare loop": [1.0]})
    assert peers_table.ratios_in_turns(FULL.name, {"in turns": no_pinned}) == {}


def standing(rows: dict[str, dict]) -> Standing:
    return peers_table.goals(rows)[0].standing


@pytest.mark.parametrize(
    ("ours", "wanted"), [(1 / (LEVEL + 0.001), Standing.MET), (1 / (LEVEL - 0.001), Standing.NOT_MET)]
)
def test_level_is_by_the_fastest_of_the_others(ours: float, wanted: Standing):
    rows = alone_rows(FULL, {PINNED: ours, "TRL SFTTrainer": 1.5, "bare loop": 1.0})
    assert standing(rows) is wanted


def test_turns_decide_where_both_took_them():
    rows = alone_rows(FULL, {PINNED: 1.0, "bare loop": 1.2, "TRL SFTTrainer": 1.1})
    assert standing(rows) is Standing.MET
    rows["in turns"] = turns_row(FULL, {PINNED: [1.0] * 4, "bare loop": [0.9] * 4})
    goal = peers_table.goals(rows)[0]
    assert goal.is_met is False and goal.reason == "slower than bare loop"
    assert "(in turns" in peers_table.tables(rows)["peers"]


def test_more_memory_than_the_fastest_is_not_level():
    rows = alone_rows(FULL, {PINNED: 1.0, "bare loop": 1.0})
    peer = rows[peers.alone_name(FULL, BY_NAME["bare loop"], 1)]
    peer["memory"] = {"peak_allocated_bytes": 19 * GIB}
    goal = peers_table.goals(rows)[0]
    assert goal.is_met is False and goal.reason == "more memory than bare loop"
    peer["memory"] = {}
    assert peers_table.goals(rows)[0].reason == "memory that was not counted than bare loop"


def test_what_shardwise_would_choose_itself_is_not_held_beside_the_others():
    rows = alone_rows(FULL, {PINNED: 1.5, PLANNED: 0.5, "bare loop": 1.0})
    assert standing(rows) is Standing.NOT_MET


def test_nothing_measured_is_no_verdict_and_not_to_run_is_one():
    assert [goal.standing for goal in peers_table.goals({})] == [Standing.NOT_MEASURED] * len(CONTESTS)
    assert standing(alone_rows(FULL, {PINNED: 1.0})) is Standing.NOT_MEASURED
    assert standing(alone_rows(FULL, {"bare loop": 1.0})) is Standing.NOT_MEASURED
    rows = alone_rows(FULL, {PINNED: 1.0, "bare loop": 1.0})
    rows[peers.alone_name(FULL, BY_NAME[PINNED], 1)] |= {"outcome": "failed", "reason": "out of memory"}
    goal = peers_table.goals(rows)[0]
    assert (goal.standing, goal.figure) == (Standing.NOT_MET, "out of memory")


def test_who_did_not_run_has_a_line_that_says_why():
    rows = alone_rows(FULL, {PINNED: 1.0})
    failed = alone_row(FULL, "bare loop") | {"outcome": "failed", "reason": "ended with 1:\n a | b"}
    missing = alone_row(FULL, "Axolotl", version=None) | {"outcome": "not installed here"}
    del missing["lines"]
    rows |= {"failed": failed, "missing": missing}
    rows["turns"] = {"contest": FULL.name, "outcome": "failed", "reason": "out of memory"}
    rows[f"{FULL.name}: torchtitan, round 1"] = {"error": "OSError: no\nroom"}
    text = peers_table.tables(rows)["peers"]
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    assert "| ended with 1: a \\| b |" in lines["bare loop"]
    assert lines["Axolotl"] == "| Axolotl | not installed here | - | - | - | - | - | - | - | - |"
    assert "In turns: failed: out of memory." in text
    assert f"- {FULL.name}: torchtitan, round 1: OSError: no room" in text
    heads = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(heads) == 1


def test_steps_that_raised_are_told_also_where_nothing_else_is():
    assert peers_table.tables({}) == {}
    rows = {"8B, LoRA: bare loop, round 1": {"error": "OSError: no room"}}
    assert "no room" in peers_table.tables(rows)["peers"]
    assert [goal.is_met for goal in peers_table.goals(rows)] == [None] * len(CONTESTS)


def test_a_table_says_what_it_is_of():
    text = peers_table.tables(alone_rows(FULL, {PINNED: 1.0, "bare loop": 1.0}))["peers"]
    assert "A rehearsal" not in text and "of 989 TFLOP/s" in text and "torch's counters" in text
    text = peers_table.tables(alone_rows(FULL, {PINNED: 1.0, "bare loop": 1.0}, is_cuda=False))["peers"]
    assert "A rehearsal with a tiny model" in text and "what was resident" in text and "no peak is stated" in text
    assert "`train bare loop`" in text and "Versions: torch 2.0." in text


def test_who_ran_in_another_python_has_versions_of_its_own():
    rows = alone_rows(FULL, {PINNED: 1.0, "bare loop": 1.0})
    rows["other"] = alone_row(FULL, "Axolotl", versions={"torch": "1.9"})
    text = peers_table.tables(rows)["peers"]
    assert f"Versions of {PINNED}, bare loop: torch 2.0." in text and "Versions of Axolotl: torch 1.9." in text


def test_what_shardwise_chose_itself_is_told(tmp_path: Path):
    chosen = peers._chosen(planned(BY_NAME[PLANNED], FULL, tmp_path).chosen)
    rows = alone_rows(FULL, {PINNED: 1.0, "bare loop": 1.0}) | alone_rows(FULL, {PLANNED: 1.0}, chosen=chosen)
    json.dumps(rows)
    line = next(line for line in peers_table.tables(rows)["peers"].splitlines() if line.startswith("What shardwise"))
    assert f"precision {FULL.precision}" in line and f"micro batch {chosen['micro batch']}" in line
