"""`shardwise plan` as it is typed: one machine or several, questions on limits, text, JSON and a page, exit codes."""

import json
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_texts import install_slurm
from typed_command import Run, in_empty_home, typed, write_rows

from shardwise.launch.commands.plan import machines, next_commands
from shardwise.launch.inputs.model_files import known_models, read_preset
from shardwise.launch.options import PlanOptions
from shardwise.launch.plan.gather import plan_inputs, profile_data
from shardwise.trainer.spec.errors import ExitCode, NothingFitsError
from shardwise.trainer.spec.model.readers import admitted_types

JOB = """\
model: {{name: llama-3.2-1b}}
data: {{train: {data}, eval: none}}
train: {{seq_len: 1024, tokens_per_step: 16384, tokens: 2M}}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`shardwise COMMAND job.yaml WORDS` in an empty home."""
    in_empty_home(tmp_path, monkeypatch)
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(data=write_rows(tmp_path)))
    return lambda command, *words: typed(capsys, command, str(job), *words)


def test_the_engine_of_a_plan_is_written_for_a_script_of_ones_own(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "eng ine"
    words = ("--hardware", "8xH100-SXM5-80GB", "pin.sharding=zero3", "--engine-files", str(folder))
    code, out, _ = run("plan", *words, "--json")
    chosen = json.loads(out)["candidates"][0]
    settings = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert (code, settings["num_processes"]) == (ExitCode.DONE, 8)
    config = json.loads(Path(settings["deepspeed_config"]["deepspeed_config_file"]).read_text())
    assert config["zero_optimization"]["stage"] == 3
    assert config["train_micro_batch_size_per_gpu"] == chosen["micro_batch"]
    _, out, _ = run("plan", *words)
    assert f"accelerate launch --config_file '{folder}/accelerate.yaml' YOUR_SCRIPT.py" in out
    assert f"micro batch {chosen['micro_batch']}, accumulation {chosen['accumulation']}, " in out
    code, out, err = run("plan", "--hardware", "2x8xH100-SXM5-80GB", "--engine-files", str(tmp_path / "engine"))
    assert (code, out) == (ExitCode.INPUT, "") and "--hardware" in err, "of one machine alone"
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3", "fsdp"])
def test_several_cpu_ranks_of_a_script_train_together_or_not_at_all(run: Run, tmp_path: Path, sharding: str) -> None:
    """Accelerate has DDP alone for them, and only for a script that states the CPU itself."""
    folder = tmp_path / "engine"
    words = ("plan", "model.name=pythia-70m", "--method", "full", "--engine-files", str(folder))
    code, out, err = run(*words, "--hardware", "2xCPU", f"pin.sharding={sharding}")
    assert (code, out) == (ExitCode.INPUT, "") and sharding in err and not folder.exists()
    _, remedy = err.strip().rsplit("; ", 1)
    code, out, _ = run(*words, "--hardware", "2xCPU", remedy)
    settings = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert (code, settings["use_cpu"], settings["num_processes"]) == (ExitCode.DONE, True, 2)
    assert "use_cpu=True" in out and "each of the 2 processes" in out
    code, out, _ = run(*words, "--hardware", "1xCPU")
    assert code == ExitCode.DONE and "use_cpu=True" not in out


def test_the_printed_commands_repeat_every_option(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--hardware", "2xRTX-4090", "--gpus", "0", "--vram", "20GiB", "--take", "2")
    changes = ("train.lr=1e-4", "train.method=lora")
    _, out, _ = run("plan", *changes, *options)
    commands = dict(line.split(maxsplit=1) for line in out.splitlines() if line.startswith(("  start", "  more")))
    _, *again = shlex.split(commands["more"])
    assert again[2:] == [*changes, *options[:2], "--vram", "20480MiB", "--gpus", "0", "--take", "2", "-v"]
    assert commands["start"].endswith(" train.method=lora --vram 20480MiB --gpus 0 --take 2")
    repeated, expected = run(*again[:1], *again[2:]), run("plan", *changes, *options, "-v")
    assert repeated == expected
    (tmp_path / "bin").mkdir()
    for name, value in install_slurm(tmp_path / "bin", "fake_nodes").items():
        monkeypatch.setenv(name, value)
    _, out, _ = run("plan", *changes, "--partition", "gpu", "--nodes", "2")
    (start,) = (shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  start"))
    assert start[:2] == ["shardwise", "submit"] and start[-4:] == ["--partition", "gpu", "--nodes", "2"]


def test_sections_are_shown_by_name_and_a_page_holds_all(run: Run, tmp_path: Path) -> None:
    words, page = ("plan", "--hardware", "1xRTX-4090"), tmp_path / "plan.html"
    code, out, _ = run(*words, "--show", "why,memory", "--html", str(page))
    assert code == ExitCode.DONE and page.read_text().count("<h1>") == 1
    assert [part.split()[0] for part in out.split("\n\n")[1:]] == ["memory", "why"]
    code, _, err = run(*words, "--show", "why,wy")
    assert code == ExitCode.INPUT and "--show wy" in err and "memory" in err


def test_several_machines_are_compared_and_one_that_fits_is_enough(run: Run, tmp_path: Path) -> None:
    both, page = ("--hardware", "1xRTX-4090", "--hardware", "2xH100-SXM5-80GB"), tmp_path / "plan.html"
    code, out, _ = run("plan", "price_per_gpu_hour=2", *both, "--html", str(page))
    assert code == ExitCode.DONE and page.read_text().count("<h1>") == 3
    assert out.count("\n  how  ") == 2 and "  start  " not in out
    compared = out.rpartition("\n\n")[2]
    assert "fastest: 2xH100-SXM5-80GB" in compared and "cheapest: " in compared
    words = ("model.name=llama-3.1-70b", "--hardware", "1xRTX-4060-8GB", "--hardware", "8xH100-SXM5-80GB")
    code, out, _ = run("plan", *words)
    assert code == ExitCode.DONE and "nothing fits" in out
    assert run("plan", *words[:3])[0] == ExitCode.NOTHING_FITS


def test_questions_are_answered_in_text_on_a_page_and_in_json(run: Run, tmp_path: Path) -> None:
    sizes = {"longest_seq": "seq_len", "largest_batch": "micro_batch", "largest_model": "num_parameters"}
    words, page = ("plan", "--hardware", "1xRTX-4090"), tmp_path / "limits.html"
    code, out, _ = run(*words, "--largest-batch", "--html", str(page))
    assert code == ExitCode.DONE and "  how  " not in out and "the largest" in out
    assert page.read_text().count("<h1>") == 1
    code, out, _ = run(*words, *(f"--{question.replace('_', '-')}" for question in sizes), "--json")
    answers: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert code == ExitCode.DONE and [each["question"] for each in answers] == [*sizes]
    for answer in answers:
        assert {row["method"] for row in answer["answers"]} >= {"lora", "qlora"}
        assert all(row[sizes[answer["question"]]] > 0 for row in answer["answers"])
    _, out, _ = run(*words, "--hardware", "1xL4", "--longest-seq", "--json")
    assert [json.loads(line)["machine"] for line in out.splitlines()] == ["1 x RTX-4090", "1 x L4"]


RTX_4060 = ("--hardware", "rtx 4060")
SPECS = ("1xH200",)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`shardwise WORDS` in an empty home that is the working directory, without a network."""
    in_empty_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def refuse(*_: object) -> None:
        raise AssertionError("a plan of a known model asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return lambda *words: typed(capsys, *words)


def test_every_known_model_plans_a_lora_job_without_a_network(model: Run, tmp_path: Path) -> None:
    """Of each architecture one model is planned to the end."""
    del model
    planned: set[str] = set()
    for known in known_models():
        if known.config["model_type"] not in admitted_types():  # `test_trace` plans these
            continue
        method = "lora" if known.hub else "full"
        options = PlanOptions(Path(known.hub[0] if known.hub else known.name), seq_len=512, method=method, specs=SPECS)
        ((_, inputs),) = machines(options)
        assert inputs.resolved.name and inputs.shape.num_parameters > 0
        if inputs.shape.model_type in planned:
            continue
        try:
            plan = plan_inputs(inputs, profile_data(inputs), environment={"HOME": str(tmp_path)})
        except NothingFitsError:
            assert inputs.shape.num_parameters > 60e9, known.name
            continue
        assert plan.chosen.method == method and plan.data.num_tokens == pytest.approx(20e6, rel=0.02)
        planned.add(inputs.shape.model_type)


def test_a_model_and_a_file_are_a_job(model: Run, tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    words = ("plan", "Qwen/Qwen2.5-7B", "--data", "rows.txt", *RTX_4060, "--method", "qlora", "--seq-len", "1024")
    opt_ins = ("--allow", "bf16_weights,optimizer_8bit", "--forbid", "offload_cpu,fp8")
    code, out, _ = model(*words, *opt_ins, "train.seq_len=512", "--json")
    plan = json.loads(out)
    job = plan["job"]
    assert (code, job["train"]["method"], job["train"]["seq_len"]) == (ExitCode.DONE, "qlora", 512)
    assert job["allow"] == ["bf16_weights", "optimizer_8bit"]
    assert [source["source"] for source in job["data"]["train"]] == [rows.name]
    notes = " ".join((*plan["notes"], *plan["data"]["notes"]))
    assert "package's own table" in notes and "14,000 bytes of text are counted as" in notes
    assert "Qwen2.5-7B".lower() in plan["name"] and plan["hardware"]["gpus"][0]["name"] == "RTX-4060-8GB"


def test_without_data_the_hub_is_not_contacted_for_a_model_of_the_table(model: Run, tmp_path: Path) -> None:
    write_rows(tmp_path)
    for words, is_contacted in ((), False), (("--data", "rows.txt"), True):
        code, out, _ = model("plan", "Qwen/Qwen2.5-0.5B", *RTX_4060, *words, "--json")
        notes = " ".join(json.loads(out)["notes"])
        assert code == ExitCode.DONE and "package's own table (qwen2.5-0.5b" in notes
        assert ("the hub was not reached" in notes) is is_contacted


def test_a_plan_of_assumed_data_does_not_train(model: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(model("plan", "tiny-llama", "--hardware", "1xCPU", "train.tokens=1M", "--json").out)
    code, _, err = model("train", str(plan))
    assert code == ExitCode.INPUT and "--data FILE" in err


def test_rows_are_no_longer_than_the_positions_of_a_model_unless_stated(model: Run, tmp_path: Path) -> None:
    config = read_preset("tiny-llama") | {"max_position_embeddings": 1024}
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    for words, seq_len in ((), 1024), (("--seq-len", "512"), 512), (("train.seq_len=256",), 256):
        code, out, _ = model("plan", "short", "--hardware", SPECS[0], *words, "--json")
        assert (code, json.loads(out)["job"]["train"]["seq_len"]) == (ExitCode.DONE, seq_len)
    code, _, err = model("plan", "short", "--hardware", SPECS[0], "--seq-len", "4096")
    assert code == ExitCode.INPUT and "1024 positions" in err
    write_rows(tmp_path)
    (tmp_path / "own.yaml").write_text("model: {config: short, tokenizer: train}\ndata: {train: rows.txt}\n")
    code, out, _ = model("plan", "own.yaml", "--hardware", SPECS[0], "--json")
    assert (code, json.loads(out)["job"]["train"]["seq_len"]) == (ExitCode.DONE, 1024)


def test_an_existing_job_file_wins_and_options_apply_over_it(model: Run, tmp_path: Path) -> None:
    write_rows(tmp_path)
    (tmp_path / "qwen2.5-0.5b").write_text(JOB.format(data="rows.txt"))
    code, out, _ = model("plan", "qwen2.5-0.5b", "--method", "lora", *RTX_4060, "--json")
    plan = json.loads(out)
    assert (code, plan["job"]["train"]["method"]) == (ExitCode.DONE, "lora")
    assert plan["job"]["model"]["name"] == "llama-3.2-1b"


def test_the_next_commands_work_as_printed(model: Run, tmp_path: Path) -> None:
    write_rows(tmp_path)
    options = PlanOptions(Path("tiny-llama"), ("train.lr=1e-3",), data="rows.txt", seq_len=128)
    init, train = (shlex.split(line) for line in next_commands(options))
    assert model(*init[1:]).code == ExitCode.DONE
    assert train == ["shardwise", "train", "job.yaml", "train.seq_len=128", "train.lr=1e-3"]
    code, out, _ = model("plan", *train[2:], "--hardware", "1xCPU", "--json")
    job = json.loads(out)["job"]
    assert (code, job["train"]["seq_len"], job["model"]["config"]) == (ExitCode.DONE, 128, "tiny-llama")
    code, out, _ = model("plan", "tiny-llama", "--hardware", "1xRTX-4090", "--simulate")
    assert code == ExitCode.DONE and "dry run" in out
    code, out, _ = model("data", *train[2:], "data.packing=false")
    assert code == ExitCode.DONE and "rows" in out and "a row of text" in out.partition("the first example")[2]
    of_a_file = PlanOptions(Path("job.yaml"), method="lora")
    assert next_commands(of_a_file) == ("shardwise train job.yaml train.method=lora",)
    assert "YOUR_DATA" in next_commands(PlanOptions(Path("tiny-llama")))[0]


@pytest.mark.parametrize("num_rows", [200, 60_000], ids=["all are counted", "a sample"])
def test_an_unprepared_plan_takes_padded_rows_as_long_as_they_are(run: Run, tmp_path: Path, num_rows: int) -> None:
    """Time, speed and tokens of one plan agree; a row of 50 tokens has not the time of one of seq_len."""
    turns = [{"role": "user", "content": "who"}, {"role": "assistant", "content": "it is " * 20}]
    row = json.dumps({"messages": turns})
    (tmp_path / "chats.jsonl").write_text(f"{row}\n" * num_rows)
    words = ("data.packing=false", "train.tokens=null", "train.tokens_per_step=null")
    code, out, _ = run("plan", f"data.train={tmp_path}/chats.jsonl", *words, "--hardware", "1xRTX-4090", "--json")
    plan = json.loads(out)
    (width,) = plan["data"]["batch_widths"]
    assert (code, plan["data"]["num_rows"]) == (ExitCode.DONE, pytest.approx(num_rows, rel=0.02))
    assert width["mean_width"] == pytest.approx(len(row) / 3.9, rel=0.05)
    speed, schedule = plan["candidates"][0]["speed"], plan["schedule"]
    tokens = speed["step_s"] * speed["tokens_per_s_per_gpu"]
    assert tokens == pytest.approx(schedule["sequences_per_step"] * width["mean_width"], rel=0.1)


@pytest.mark.parametrize("setting", ["train.lora.rank=8", "train.lr=1"])
def test_a_setting_that_does_nothing_or_ruins_a_run_is_a_warning_of_its_plan(run: Run, setting: str) -> None:
    code, out, _ = run("plan", "train.method=full", setting, "--hardware", "1xH100-SXM5-80GB")
    assert code == ExitCode.DONE and f"WARNING: {setting.partition('=')[0]} " in out
