"""A plan that does not exist: what was tried, what is missing, and ways out that give plans when they are pasted."""

import json
import shlex
from html import unescape
from pathlib import Path

import pytest
from planning_factory import machine
from typed_command import Run, in_empty_home, typed

from shardwise.launch.commands.ways_out import RAM_SIZES, screen
from shardwise.trainer.planning.explain.alternatives import Alternative
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import Attempt, ExitCode, NothingFitsError
from shardwise.trainer.spec.units import GIB

CAPPED = ("--method", "full", "--vram", "6GiB")
NOES = {
    "host RAM of a desktop": ("llama-3.1-8b", "--method", "full", "--hardware", "rtx 4060"),
    "NVMe, with more of RAM": ("llama-3.1-8b", "--method", "full", "--hardware", "1xRTX-4060-8GB,ram=64GiB"),
    "of two cards": ("llama-3.1-8b", "--method", "lora", "--forbid", "offload_cpu", "--hardware", "2xRTX-4060-8GB"),
    "long rows": ("llama-3.1-8b", "--method", "qlora", "--seq-len", "65536", "--hardware", "1xRTX-4060-8GB"),
    "long rows by key": ("llama-3.1-8b", "train.method=qlora", "train.seq_len=65536", "--hardware", "1xRTX-4060-8GB"),
    "an opt-in": ("llama-3.2-1b", "--method", "full", "--forbid", "offload_cpu", "--hardware", "1xRTX-4070-Ti-SUPER"),
    "several opt-ins": (
        "llama-3.1-8b", "--method", "full", "--forbid", "offload_cpu", "train.tokens_per_step=65536", "--hardware",
        "1xRTX-4090,ram=40GiB",
    ),
    "a pin": ("llama-3.1-8b", "--method", "full", "pin.offload=none", "--hardware", "1xRTX-4090,ram=256GiB"),
    "time": ("llama-3.1-8b", "--method", "full", "limits.hours=0.1", "--hardware", "1xA100-SXM4-80GB"),
    "cost": ("llama-3.2-1b", "limits.cost=0.01", "price_per_gpu_hour=2", "--hardware", "1xRTX-4090"),
    "a cap": ("llama-3.2-1b", *CAPPED, "--forbid", "offload_cpu", "--hardware", "1xRTX-4090"),
    "nodes": ("llama-3.1-70b", "--method", "full", "--hardware", "2x8xRTX-4060-8GB"),
    "far too large": ("llama-3.1-70b", "--method", "full", "--hardware", "1xRTX-4060-8GB"),
}  # fmt: skip
QUICK = ("NVMe, with more of RAM", "long rows by key", "several opt-ins", "a pin", "a cap")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`shardwise plan WORDS` in an empty home, without a network."""
    in_empty_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda *words: typed(capsys, "plan", *words)


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, id=name, marks=[] if name in QUICK else pytest.mark.long) for name, words in NOES.items()],
)
def test_every_way_out_gives_a_plan_when_it_is_pasted(plan: Run, words: tuple[str, ...]) -> None:
    code, out, err = plan(*words)
    assert (code, err) == (ExitCode.NOTHING_FITS, ""), (out, err)
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("      shardwise plan ")]
    assert commands and len({tuple(each) for each in commands}) == len(commands)
    for _, _, *arguments in commands:
        code, fitting, err = plan(*arguments)
        assert code == ExitCode.DONE and ": fits," in " ".join(fitting.split()), (arguments, err)


def test_opt_ins_that_suffice_only_together_are_all_needed(plan: Run) -> None:
    _, out, _ = plan(*NOES["several opt-ins"], "--json")
    (way,) = [each for each in json.loads(out)["ways_out"] if each["name"].startswith("opt-ins")]
    command = shlex.split(way["command"])[2:]
    at = command.index("--allow") + 1
    allowed = command[at].split(",")
    assert len(allowed) > 1
    for each in allowed:
        command[at] = ",".join(other for other in allowed if other != each)
        forbidden = ["--forbid", each] if each == "offload_cpu" else []
        assert plan(*command, *forbidden)[0] == ExitCode.NOTHING_FITS, each


def test_where_host_ram_is_not_known_the_least_size_that_suffices_is_named(plan: Run, tmp_path: Path) -> None:
    codec.write(tmp_path / "hardware.json", machine("2xRTX-3090", ram_bytes=None))
    _, out, _ = plan("llama-3.1-8b", "--method", "full", "--hardware", "hardware.json", "--json")
    (way,) = [each for each in json.loads(out)["ways_out"] if "of host RAM, if a node has it" in each["name"]]
    size = int(way["name"].split()[0])
    below = RAM_SIZES[RAM_SIZES.index(size) - 1]
    for ram, code in ((size, ExitCode.DONE), (below, ExitCode.NOTHING_FITS)):
        command = way["command"].replace(f"host_ram={size}GiB", f"host_ram={ram}GiB")
        assert plan(*shlex.split(command)[2:])[0] == code, ram


def test_a_run_that_cannot_be_planned_has_the_ways_out_of_its_plan(
    plan: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr; nothing is started."""
    job = str(Path(__file__).parents[3] / "examples" / "quickstart.yaml")
    code, out, err = typed(capsys, "train", job, "limits.hours=1e-6")
    (command,) = [shlex.split(line) for line in err.splitlines() if "limits.hours=1" in line.split()]
    assert (code, out) == (ExitCode.NOTHING_FITS, "") and command[:3] == ["shardwise", "plan", job]
    assert plan(*command[2:])[0] == ExitCode.DONE and not Path("runs").exists()


def test_text_json_and_page_have_the_same_ways(plan: Run, tmp_path: Path) -> None:
    words, page = NOES["host RAM of a desktop"], tmp_path / "no.html"
    code, out, _ = plan(*words, "--json", "--html", str(page))
    found = json.loads(out)
    assert (code, found["fits"]) == (ExitCode.NOTHING_FITS, False)
    assert {each["resource"] for each in found["tried"]} >= {"host RAM"}
    assert all(each["need"] > each["usable"] > 0 for each in found["tried"])
    _, text, _ = plan(*words)
    html = unescape(page.read_text())
    assert len(found["ways_out"]) >= 4
    for way in found["ways_out"]:
        assert way["seconds"] > 0 and way["command"] in text and way["command"] in html


def test_lines_have_eighty_columns_but_for_the_commands() -> None:
    strategy = "zero3+optimizer+params/bf16-mixed/deepspeed_cpu_adam"
    tried = [Attempt("full", strategy, "pinned host RAM", 1500 * GIB, 28 * GIB)]
    error = NothingFitsError(f"nothing fits: full training of 70.6B parameters ({strategy}) needs 1.5 TiB", tried)
    name, command = "opt-ins, rows of 16,384 tokens, 131,072 a step", "shardwise plan " + 90 * "m"
    way = Alternative(name=name, effect="galore", setting=command, seconds=1e6, need_bytes=100 * GIB)
    lines = screen(error, [way], name="llama-3.1-70b", width=80)
    assert max(len(line.text) for line in lines if command not in line.text) <= 80
    assert any(line.text.strip() == command for line in lines), "a command is on a line of its own"
