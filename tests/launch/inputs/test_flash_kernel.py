"""Fetching a kernel of the hub before any rank starts: from the cache, else from the hub, else with the next step."""

import os
import sys
from pathlib import Path

import pytest
from engine_plan_factory import engine_plan
from hanging_programs import pids_in, wait_until_gone
from hub_kernel_factory import KERNEL, hub_environment, put_kernel
from msgspec.structs import replace

from launch.inputs.trusted_code import fetch_flash_kernel
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.plan import Plan
from trainer.spec.strategy import Sharding

# Stands in for the interpreter: says how it was asked, and loads what the cache or, online, the hub has.
PYTHON = """#!/bin/sh
echo "$* offline=$HF_HUB_OFFLINE" >> {folder}/asked
{then}
"""


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def plan_with(kernel: str | None) -> Plan:
    plan = engine_plan(Sharding.NONE)
    return replace(plan, candidates=(replace(plan.chosen, flash_kernel=kernel),))


def fake_python(folder: Path, then: str) -> str:
    path = folder / "python"
    path.write_text(PYTHON.format(folder=folder, then=then))
    path.chmod(0o755)
    return str(path)


def asked(folder: Path) -> list[str]:
    lines = (folder / "asked").read_text().splitlines()
    return [line.removeprefix(f"-m trainer.runtime.attention.flash_kernel {KERNEL} ") for line in lines]


def test_a_plan_without_a_kernel_of_the_hub_starts_nothing():
    fetch_flash_kernel(plan_with(None), on_progress=pytest.fail, python="never started")


def test_what_is_in_the_cache_is_not_asked_for_again(tmp_path):
    fetch_flash_kernel(plan_with(KERNEL), on_progress=pytest.fail, python=fake_python(tmp_path, "exit 0"))
    assert asked(tmp_path) == ["offline=1"]


def test_what_is_not_in_the_cache_is_fetched_once_and_said(tmp_path):
    lines: list[str] = []
    python = fake_python(tmp_path, 'test -z "$HF_HUB_OFFLINE"')
    fetch_flash_kernel(plan_with(KERNEL), on_progress=lines.append, python=python)
    assert asked(tmp_path) == ["offline=1", "offline="]
    assert len(lines) == 1 and KERNEL in lines[0]


def test_a_fallback_with_a_kernel_has_it_fetched_too(tmp_path):
    plan = replace(plan_with(None), fallbacks=(plan_with(KERNEL).chosen,))
    fetch_flash_kernel(plan, on_progress=pytest.fail, python=fake_python(tmp_path, "exit 0"))
    assert asked(tmp_path) == ["offline=1"]


@pytest.mark.parametrize(("offline", "num_asked"), [("1", 1), (None, 2)])
def test_what_cannot_be_had_stops_the_run_with_its_words(tmp_path, monkeypatch, offline, num_asked):
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    python = fake_python(
        tmp_path, "echo noise >&2; echo 'attention: it cannot' >&2; echo 'do this' >&2; echo >&2; exit 4"
    )
    with pytest.raises(EnvironmentFaultError, match=r"^attention: it cannot\ndo this$"):
        fetch_flash_kernel(plan_with(KERNEL), on_progress=lambda _: None, python=python)
    assert len(asked(tmp_path)) == num_asked


@pytest.mark.parametrize(("says", "words"), [("", ""), ("seq 3 >&2;", r"\n2\n3")])
def test_a_process_that_breaks_is_named_by_its_code_and_its_last_lines(tmp_path, says, words):
    python = fake_python(tmp_path, f"{says} exit 7")
    with pytest.raises(EnvironmentFaultError, match=rf"^attention: .*{KERNEL}.* 7{words}$"):
        fetch_flash_kernel(plan_with(KERNEL), on_progress=lambda _: None, python=python)


def test_a_stop_ends_the_process_and_asks_no_more(tmp_path):
    python = fake_python(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 60")
    fetch_flash_kernel(
        plan_with(KERNEL), on_progress=pytest.fail, python=python, should_stop=lambda: bool(pids_in(tmp_path / "pid"))
    )
    wait_until_gone(*pids_in(tmp_path / "pid"))
    assert asked(tmp_path) == ["offline=1"]


@pytest.mark.cold
def test_a_kernel_of_the_cache_is_loaded_by_the_process_that_is_started(tmp_path, monkeypatch):
    put_kernel(tmp_path)
    for name, value in hub_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    fetch_flash_kernel(plan_with(KERNEL), on_progress=pytest.fail, python=sys.executable)
