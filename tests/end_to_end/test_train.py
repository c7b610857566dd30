"""`shardwise train` from a job file, or from a plan that was kept, to everything that a run leaves."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

from export_factory import IDLE, write_idle_base
from kill_factory import losses
from small_terminal import SmallTerminal
from workplace_factory import SENTENCES, TINY_CONFIG, Workplace, read_metrics, write_chats

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

FILES = (
    "job.yaml", "hardware.json", "plan.json", "metrics.jsonl", "report.json",
    "attempts/1/plan.json", "attempts/1/accelerate.yaml", "attempts/1/pids", "attempts/1/report.json",
    "attempts/1/logs/rank-0.log", "checkpoints/step-00000008/MANIFEST.json",
    "export/config.json", "export/model.safetensors",
)  # fmt: skip
METRICS = {
    "step", "epoch", "tokens", "loss", "lr", "grad_norm", "step_s", "data_s", "forward_s", "backward_s", "optimizer_s",
    "targets", "targets_per_s",
    "tokens_per_s", "tokens_per_s_per_gpu", "memory_allocated_bytes", "memory_peak_bytes", "host_rss_bytes",
    "model_tflops_per_s_per_gpu", "padding_share",
}  # fmt: skip


def test_a_run_leaves_everything_it_promises(trained):
    """And in the home only what the README names."""
    place, run_dir, _ = trained
    assert [name for name in FILES if not (run_dir / name).exists()] == []
    report = codec.read(run_dir / "report.json", Report)
    assert report.ending is Ending.FINISHED and report.exit_code == 0 and report.step == 8
    assert report.verified is not None and report.verified.world_size == 1
    assert report.predicted.memory.parts and report.measured.memory.peak_allocated_bytes
    assert report.measured.speed.tokens_per_s_per_gpu
    home = place.folder / "home"
    written = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    assert written <= {".local/state/shardwise/calibration.jsonl"}


def test_each_step_is_one_line_with_the_promised_names_and_its_parts_add_up(trained):
    _, run_dir, _ = trained
    metrics = read_metrics(run_dir)
    assert sorted(metrics) == list(range(1, 9)) and metrics[8].keys() >= METRICS
    assert metrics[8]["loss"] < metrics[1]["loss"]
    assert metrics[8]["targets"] <= metrics[8]["tokens"] <= 8 * 256
    phases = ("data", "forward", "backward", "optimizer")
    parts_of = {step: [row[f"{phase}_s"] for phase in phases] for step, row in metrics.items()}
    plain = [step for step in metrics if step != 3]  # of the profiled one, the profiler's own time is in no part
    assert sum(sum(parts_of[step]) for step in plain) > 0.5 * sum(metrics[step]["step_s"] for step in plain)
    for step, row in metrics.items():
        assert min(parts_of[step]) >= 0 and sum(parts_of[step]) <= row["step_s"] * 1.001
        assert 0 <= row["padding_share"] < 1 and "wait_s" not in row, "a lone rank waits for nobody"
    saved = [step for step, row in metrics.items() if "checkpoint_s" in row]
    assert set(saved) >= {2, 4, 7}, "after the first step, and after every third"
    speed = codec.read(run_dir / "report.json", Report).measured.speed
    assert list(speed.parts) == [*phases, "wait"] and speed.step_s is not None
    assert max(speed.parts.values()) < speed.step_s


def test_several_ranks_tell_how_long_they_waited_and_lines_come_as_often_as_asked(workplace):
    """And, once, which of their adapters have had no gradient after five steps, as soon as it is known."""
    write_idle_base(workplace.folder / "base", TINY_CONFIG, SENTENCES)
    workplace.write_job(
        model={"config": None, "tokenizer": None, "name": "base"}, train={"steps": 7, "method": "lora"},
        eval={"every": "1000 steps"}, log={"every": "3 steps"},
    )  # fmt: skip
    answer = workplace.run("plan", "job.yaml", "pin.sharding=ddp", "--hardware", "2xCPU", "--json")
    (workplace.folder / "two.json").write_text(answer.stdout)
    printed = workplace.run("train", "two.json", "--run-dir", "run").stdout
    metrics = read_metrics(workplace.folder / "run")
    assert sorted(metrics) == [1, 3, 5, 6, 7], "the first, every third, the last, and the one with an incident"
    live = f"step 5: {IDLE}"
    assert printed.count(live) == 1 and printed.index(live) < printed.index(" 7/7") < printed.index(f"incident: {IDLE}")
    assert codec.read(workplace.folder / "run" / "report.json", Report).incidents.count(IDLE) == 1
    assert all(row["wait_s"] > 0 for row in metrics.values())
    saved = [step for step, row in metrics.items() if "checkpoint_s" in row]
    assert saved == [3, 5, 6, 7], "what was saved after a step without a line stands in the next"


def test_the_terminal_tells_the_plan_the_course_and_the_next_commands_and_logs_shows_them_again(trained):
    place, run_dir, output = trained
    for words in ("held-out loss", "peak allocated", "predicted", "measured", "tokens/s", "before:", "after:"):
        assert words in output, output
    assert f"shardwise report {run_dir.relative_to(run_dir.parent.parent)}" in output
    assert output.count("fits, about") == 1
    printed, _, _ = output.partition("\nnext:")
    assert (run_dir / "console.log").read_text().strip() == printed.strip()
    assert place.run("logs", run_dir, "-n", "9999").stdout.partition("\n")[2].startswith(printed)
    assert f"last line: {printed.strip().splitlines()[-1]}" in place.run("status", run_dir).stdout


def test_by_hand_the_same_command_gives_the_same_losses_and_overwrites_nothing(trained):
    place, run_dir, _ = trained
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    attempt = run_dir / "attempts" / "1"
    place.execute(*place.by_hand(attempt), check=True)
    (again,) = attempt.glob("again-*")
    assert losses(again) == losses(run_dir)
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_whose_output_cannot_be_written_any_more_trains_to_its_end(workplace):
    """Its reader ends after the first line, and there is no room for errors."""
    command = 'set -o pipefail; "$0" -m shardwise.launch.cli train job.yaml --run-dir run 2>/dev/full | head -n 1'
    ended = workplace.execute("bash", "-c", command, sys.executable)
    assert (ended.returncode, ended.stdout.count("\n")) == (0, 1), ended.stdout
    report = codec.read(workplace.folder / "run" / "report.json", Report)
    assert report.ending is Ending.FINISHED and (workplace.folder / "run" / "export" / "config.json").is_file()


def test_400_chats_on_a_written_job_lower_the_held_out_loss(workplace: Workplace) -> None:
    place = workplace
    place.job.unlink()
    write_chats(place.folder / "chats.jsonl", 400)
    found = place.run("init", "--model", "model", "--data", "chats.jsonl").stdout
    assert all(fact in found for fact in ("llama", "128 positions", "sft on chats", "chat template chatml")), found
    planned = place.run("plan", "job.yaml").stdout
    assert "on 2 ranks" in place.run("train", "job.yaml", "--hardware", "2xCPU", "--dry-run").stdout
    assert not (place.folder / "runs").exists(), "a dry run leaves nothing behind"
    trained = place.run("train", "job.yaml").stdout
    assert "WARNING" not in planned + trained
    losses = [line["eval_loss"] for _, line in sorted(read_metrics(place.only_run()).items()) if "eval_loss" in line]
    assert max(read_metrics(place.only_run())) >= 100
    assert losses[-1] < 0.8 * losses[0]


def test_on_a_terminal_the_course_is_redrawn_in_place_and_what_is_printed_stays_above_and_below(workplace) -> None:
    workplace.write_job(train={"steps": 40}, eval={"every": "20 steps"})
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    others = ("CI", "NO_COLOR", "LC_ALL")
    environment = {name: value for name, value in workplace.environment.items() if name not in others}
    content = b""
    with subprocess.Popen(
        workplace.command("train", "job.yaml"), cwd=workplace.folder, stdin=slave, stdout=slave, stderr=slave,
        env={**environment, "TERM": "xterm-256color", "LANG": "C.UTF-8"}, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(slave)
        with suppress(OSError):  # the end of a terminal
            while more := os.read(master, 65536):
                content += more
    os.close(master)
    text, name = content.decode().replace("\r\n", "\n"), workplace.only_run().name
    assert process.returncode == 0, text
    terminal = SmallTerminal(columns=10_000)  # the plan above has longer lines, which a terminal wraps
    terminal.write(text.partition("verified:")[0])  # what follows quotes the model, which may say anything
    lines = terminal.lines
    (begin,) = [place for place, line in enumerate(lines) if line.startswith(f"{name}: ")]  # redrawn in place
    block = lines[begin : begin + 6]
    assert block[0] == f"{name}: finished, step 40 of 40"
    assert block[1] == f"progress   {'█' * 32}  100%"
    assert re.match(r"loss       [▁-█]{32}  \d\.\d{4}, held out \d\.\d{4}, learning rate", block[2])
    assert block[3].startswith("speed      ") and "% of the predicted" in block[3]
    assert block[4].startswith("memory     ") and "RAM, tensors " in block[4] and ", predicted " in block[4]
    assert block[5] == "incidents  none"
    above, below = lines[:begin], lines[begin + 6 :]
    assert any("(none/" in line for line in above) and any("finished at step 40" in line for line in below)
    assert [line for line in above if "held-out loss" in line][-1].startswith("step 40: held-out loss")
    assert "\x1b[36m" in text
