"""The plan explorer: its form is a command line of the program, and the page shows the plan of that line."""

import json
import re
import shlex
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from shardwise.launch.commands.plan import machines
from shardwise.launch.commands.ui.explorer import Form, first_form, plan_content, plan_parts, read_form, short
from shardwise.launch.commands.ui.runs import Runs
from shardwise.launch.inputs.model_files import read_preset
from shardwise.launch.options import parse_command_line
from shardwise.launch.plan.gather import plan_inputs, profile_data
from shardwise.trainer.planning.explain.plan_page import readable
from shardwise.trainer.planning.planner import take_candidate
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.units import format_count, format_seconds

SMALL = Form(model="qwen2.5-0.5b", method="lora", card="RTX-4060-8GB", tokens="5M")


def commands_of(parts: dict[str, str]) -> list[list[str]]:
    text = re.search(r'<pre class="command"[^>]*>(.*?)</pre>', parts["command"], re.DOTALL)[1]
    return [shlex.split(line) for line in unescape(text).splitlines()]


def test_the_page_shows_the_plan_of_the_command_that_it_prints():
    parts = plan_parts(SMALL)
    (_, *arguments), *start = commands_of(parts)
    assert arguments == ["plan", "qwen2.5-0.5b", "--method", "lora", "--seq-len", "2048",
                         "--hardware", "1xRTX-4060-8GB", "train.tokens=5000000"]  # fmt: skip
    _, options = parse_command_line(arguments)
    ((_, inputs),) = machines(options)
    plan = plan_inputs(inputs, profile_data(inputs))
    assert plan.chosen.strategy.name in parts["verdict"] and ">fits<" in parts["verdict"]
    assert f"{plan.schedule.num_steps:,} steps of {format_seconds(plan.chosen.speed.step_s)}" in parts["verdict"]
    assert format_count(plan.chosen.speed.tokens_per_s_per_gpu) in parts["verdict"]
    assert all(readable(name) in parts["memory"] for name, size in plan.chosen.memory.parts.items() if size)
    assert [command[1] for command in start] == ["init", "train"] and "train.tokens=5000000" in start[-1]
    other = take_candidate(plan, 2).chosen
    taken = plan_parts(SMALL._replace(take=2))["verdict"]
    assert f" steps of {format_seconds(other.speed.step_s)}<" in taken != parts["verdict"]


def test_every_other_way_is_a_link_to_its_own_plan():
    parts = plan_parts(SMALL._replace(method="auto", card="RTX-4090"))
    addresses = [unescape(each) for each in re.findall(r'<a href="/plan\?([^"]*)"', parts["ways"])]
    assert len(addresses) >= 2
    for address in addresses[:2]:
        form = read_form(parse_qs(address))
        assert form != SMALL and form.model == SMALL.model and form.tokens == SMALL.tokens
        assert ">fits<" in plan_parts(form)["verdict"]


@pytest.mark.parametrize(
    "query",
    [
        {"model": "/etc/passwd"}, {"model": "../job.yaml"}, {"model": "a/../b"}, {"model": "tests/launch"},
        {"model": "a/b/c"}, {"model": "x/y --json"}, {"model": "--json"}, {"model": "lama-3.1-8b"},
        {"card": "H999"}, {"card": "1xH100,ram=1GiB"}, {"card": "/tmp/hardware.json"}, {"method": "rlhf"},
        {"seq_len": "0"}, {"seq_len": "-1"}, {"seq_len": "1e99999999999"}, {"gpus": "17"}, {"nodes": "1.5"},
        {"tokens": "many"}, {"take": "100"},
    ],
    ids=lambda query: "=".join(*query.items()),
)  # fmt: skip
def test_only_what_the_form_offers_is_planned(query: dict[str, str], tmp_path: Path):
    with pytest.raises(InputError):
        read_form({name: [value] for name, value in query.items()})
    content = plan_content(Runs(tmp_path), {name: [value] for name, value in query.items()})
    assert content.parts["verdict"].startswith('<p class="alert">') and content.parts["command"] == ""


def test_a_hub_id_is_its_preset_unknown_opt_ins_are_left_out_and_what_the_hub_lacks_is_a_short_problem(tmp_path: Path):
    form = read_form({"model": ["Qwen/Qwen2.5-0.5B-Instruct"], "allow": ["fp8", "x; rm -rf /"], "seq_len": ["4k"]})
    assert form == Form(model="qwen2.5-0.5b", allow=("fp8",), seq_len=4000)
    assert read_form({}) == Form() and Form().query == {}
    assert [read_form({"card": [name]}).card for name in ("H100", "rtx 3090")] == ["H100-PCIe-80GB", "RTX-3090"]
    assert read_form({"model": ["nobody/none-such"]}).arguments[:2] == ["plan", "nobody/none-such"]
    verdict = plan_content(Runs(tmp_path), {"model": ["nobody/none-such"]}).parts["verdict"]
    assert verdict.startswith('<p class="alert">') and "nobody/none-such" in verdict and verdict.count("<br>") <= 2
    text = short("\n".join(f"line {number} {'x' * 400}" for number in range(34)))
    assert len(text.splitlines()) == 3 and "32 more" in text and max(map(len, text.splitlines())) < 260


def test_where_nothing_fits_what_would_is_named_and_each_way_that_the_form_can_state_is_a_link():
    parts = plan_parts(Form(model="llama-3.1-8b", method="full", card="RTX-4060-8GB"))
    assert "does not fit" in parts["verdict"] and "would fit with" in parts["verdict"]
    assert "missing" in parts["memory"] and "host RAM" in parts["memory"]
    assert commands_of(parts)[0][:3] == ["shardwise", "plan", "llama-3.1-8b"]
    links = [part.partition('"')[0] for part in unescape(parts["ways"]).split('href="/plan?')[1:]]
    assert len(links) >= 3 and ">fits<" in plan_parts(read_form(parse_qs(links[0])))["verdict"]


def test_the_own_file_of_the_command_line_is_planned_with_its_own_settings(tmp_path: Path):
    job = tmp_path / "job.yaml"
    job.write_text("model: {name: qwen2.5-0.5b}\ndata: {train: none.jsonl}\ntrain: {method: lora, steps: 3}\n")
    runs = Runs(tmp_path, job)
    first = plan_content(runs, {})
    assert f'value="{job}"' in first.head and first_form(job).arguments == ["plan", str(job)]
    assert first.parts["verdict"].startswith('<p class="alert">') and "none.jsonl" in first.parts["verdict"]
    changed_form = read_form({"model": [str(job)], "seq_len": ["1024"], "card": ["RTX-4090"]}, job)
    assert changed_form.arguments == ["plan", str(job), "--seq-len", "1024", "--hardware", "1xRTX-4090"]
    with pytest.raises(InputError):
        read_form({"model": [str(job)]})
    config = tmp_path / "config.json"
    config.write_text(json.dumps(read_preset("qwen2.5-0.5b")))
    parts = plan_content(Runs(tmp_path, config), {"method": ["lora"], "card": ["RTX-4060-8GB"]}).parts
    assert ">fits<" in parts["verdict"] and commands_of(parts)[0][:3] == ["shardwise", "plan", str(config)]
