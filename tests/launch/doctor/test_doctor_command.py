"""`shardwise doctor` as a command: what it prints, its exit codes, what a job needs, and what it never shows."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from doctor_factory import BrokenMachine
from hanging_programs import under_a_limit
from hub_server import Hub, serving
from workplace_factory import make_workplace

from shardwise.launch.doctor.command import CHECKS, JOB_CHECK, Check, run_checks, run_doctor
from shardwise.launch.doctor.finding import Finding, Level, diagnosis_of, fault, fine, render_diagnosis, warning
from shardwise.launch.options import DoctorOptions
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import ExitCode

OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
SECRETS = {
    "HF_TOKEN": "hf_" + "Zz9Yy8Xx7W" * 3,
    "WANDB_API_KEY": "feedface" * 5,
    "HTTPS_PROXY": "http://ada:open-sesame-1815@127.0.0.1:9",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-K7MDENG-bPxRfiCY",
}


@pytest.fixture
def workplace(tmp_path):
    made = make_workplace(tmp_path / "work")
    (made.folder / "home").mkdir()
    made.environment.update(OFFLINE)
    made.environment.pop("OMP_NUM_THREADS")
    return made


def doctor(workplace, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = workplace.run("doctor", *arguments, "--json", check=False)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def findings_of(diagnosis: dict[str, Any], check: str, level: str) -> list[dict[str, str]]:
    return [row for row in diagnosis["findings"] if (row["check"], row["level"]) == (check, level)]


def test_a_machine_that_trains_has_no_fault_and_a_job_file_that_is_wrong_is_exit_code_2(workplace):
    code, diagnosis = doctor(workplace, "job.yaml")
    assert [row for row in diagnosis["findings"] if row["level"] == "fault"] == []
    assert (code, diagnosis["num_faults"]) == (0, 0)
    (torch,) = findings_of(diagnosis, "torch", "fine")
    assert "torch" in torch["sentence"]
    (met,) = findings_of(diagnosis, "collective", "fine")
    assert "all-gather" in met["sentence"]
    sentences = [row["sentence"] for row in findings_of(diagnosis, "job", "fine")]
    assert any("job.yaml" in sentence and "micro batch" in sentence for sentence in sentences)
    assert any("40 files" in sentence for sentence in sentences)
    result = workplace.run("doctor", "job.yaml", "train.no_such=1", check=False)
    assert result.returncode == ExitCode.INPUT and result.stderr.startswith("shardwise: ")


@pytest.mark.parametrize(
    ("section", "settings", "sentence", "fix"),
    [
        ("model", {"config": "no/such/folder/here"}, "model.config: no/such/folder/here", ""),
        ("limits", {"vram": "2MiB"}, "", ""),  # it fits nowhere
        ("model", {"config": None, "name": "org/name", "tokenizer": None}, "HF_HUB_OFFLINE", "name a local folder"),
        ("log", {"wandb": "online"}, "log.wandb: online", "wandb login"),
    ],
)
def test_a_job_that_cannot_run_is_a_fault_also_of_the_quick_checks(workplace, section, settings, sentence, fix):
    workplace.write_job(**{section: settings})
    for name in ("WANDB_MODE", "WANDB_API_KEY") if section == "log" else ():
        workplace.environment.pop(name, None)
    code, diagnosis = doctor(workplace, "job.yaml", "--quick")
    (found,) = findings_of(diagnosis, JOB_CHECK, "fault")
    assert code == ExitCode.ENVIRONMENT and sentence in found["sentence"] and found["fix"] and fix in found["fix"]
    checked = {row["check"] for row in diagnosis["findings"]}
    assert len(checked) > 5 and checked.isdisjoint({check.name for check in CHECKS if check.is_slow}), "--quick"


def test_no_secret_is_ever_shown(workplace):
    """Neither in a sentence nor in a remedy, nor what the hub is asked with."""
    secret = SECRETS["AWS_SECRET_ACCESS_KEY"]
    workplace.environment.update(SECRETS)
    workplace.write_job(model={"config": None, "name": "org/name", "tokenizer": None}, log={"wandb": "offline"})
    del workplace.environment["HF_HUB_OFFLINE"]
    with serving(Hub()) as hub:
        workplace.environment.update(HF_ENDPOINT=hub.url, no_proxy="127.0.0.1", SHARDWISE_CACHE=f"/proc/{secret}")
        result = workplace.run("doctor", "job.yaml", "--quick", check=False)
    text = result.stdout + result.stderr
    assert hub.requests and "the cache cannot be written: /proc" in text and "sudo chown $USER /proc/[redacted]" in text
    for hidden in (*SECRETS.values(), "open-sesame-1815"):
        assert hidden not in text


def test_findings_hold_no_secret_before_they_are_printed(tmp_path, monkeypatch):
    """As from Python, without the redaction of the command line."""
    monkeypatch.chdir(tmp_path)
    secret = SECRETS["AWS_SECRET_ACCESS_KEY"]
    (tmp_path / secret).touch()
    environment = {"HOME": str(tmp_path), **SECRETS, "SHARDWISE_CACHE": str(tmp_path / secret)}
    out = io.StringIO()
    run_doctor(DoctorOptions(quick=True), Console(out), environment=environment)
    shown = f"{tmp_path}/[redacted]"
    assert f"{shown} is a file" in out.getvalue() and f"sudo chown $USER {shown}" in out.getvalue()
    assert secret not in out.getvalue()


def test_faults_come_first_and_the_last_line_sums_up():
    named = [warning("slow", "faster"), fine("well"), fault("broken", "mend it"), fault("missing", "get it")]
    found = diagnosis_of(
        Finding(check="a check", level=each.level, sentence=each.sentence, fix=each.fix) for each in named
    )
    text = render_diagnosis(found)
    shown = ("faults", "broken", "mend it", "missing", "get it", "warnings", "slow", "faster", "fine", "well")
    places = [text.find(word) for word in shown]
    assert -1 not in places and places == sorted(places) and text.splitlines()[-1] == "2 faults, 1 warning"
    assert found.exit_code is ExitCode.ENVIRONMENT
    assert diagnosis_of([warning("slow", "faster")]).exit_code is ExitCode.DONE
    assert diagnosis_of([fault("no driver", "install it")] * 2).num_faults == 1


def test_a_check_that_hangs_costs_only_its_own_result(tmp_path):
    machine = BrokenMachine(tmp_path).read()

    def hang(_machine):
        time.sleep(600)
        yield fine("never")

    checks = (Check("hanging", hang), Check("quick", lambda _machine: [fine("done")]))
    reported, _ = under_a_limit(
        lambda limit_s: list(run_checks(machine, checks, deadline_s=limit_s)),
        lambda found: found[1].level is Level.FINE,
    )
    assert [(found.check, found.level) for found in reported] == [("hanging", Level.WARNING), ("quick", Level.FINE)]
    assert " s" in reported[0].sentence


def test_the_document_has_a_row_for_each_check():
    text = (Path(__file__).parents[3] / "docs" / "install.md").read_text().partition("\n## Stored files")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| [^|]+ \|", text, re.MULTILINE)
    assert rows == [*(check.name for check in CHECKS), JOB_CHECK]
    slow = set(re.findall(r"^\| `([\w-]+)` \|.*\| slow \|$", text, re.MULTILINE))
    assert slow == {check.name for check in CHECKS if check.is_slow}
