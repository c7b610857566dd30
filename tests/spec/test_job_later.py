"""What this version cannot train with is said before anything starts; planning for it stays possible."""

from typing import Any

import pytest

from trainer.spec.job_fields import BY_PATH
from trainer.spec.job_file import later_problems, read_job
from trainer.spec.job_later import COMES_LATER

NEEDED: dict[str, dict[str, Any]] = {
    "data.loss_on": {"data": {"format": "auto"}},
    "data.streaming": {"train": {"steps": 10}},
    "pin.offload": {"limits": {"nvme": {"path": "/nvme"}}},
}
ANY_VALUE = {"eval.early_stop": 3}


def job_with(path: str, value: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"name": "a/b"}, "data": {"train": "x"}}
    for section, settings in NEEDED.get(path, {}).items():
        tree[section] = {**tree.get(section, {}), **settings}
    *outer, name = path.split(".")
    section = tree
    for part in outer:
        section = section.setdefault(part, {})
    section[name] = value
    return tree


ROWS = [(row, value) for row in COMES_LATER for value in (row.values or (ANY_VALUE.get(row.path, "some text"),))]


@pytest.mark.parametrize(("row", "value"), ROWS, ids=[f"{row.path}-{value}" for row, value in ROWS])
def test_each_row_is_legal_and_answers_with_its_version(row, value):
    job = read_job(job_with(row.path, value), origin="job.yaml")
    (line,) = later_problems(job)
    assert line.startswith(f"{row.path}: ")
    assert line.endswith(f" comes with shardwise {row.version}")


def test_the_line_names_the_value():
    job = read_job(job_with("log.wandb", "offline"), origin="job.yaml")
    assert later_problems(job) == ("log.wandb: offline comes with shardwise 0.7",)


def test_true_is_written_as_in_the_file():
    job = read_job(job_with("log.tensorboard", True), origin="job.yaml")
    assert later_problems(job) == ("log.tensorboard: true comes with shardwise 0.7",)


def test_all_of_them_are_shown_at_once():
    tree = job_with("log.wandb", "online")
    tree["log"]["tensorboard"] = True
    assert [line.split(":")[0] for line in later_problems(read_job(tree, origin="job"))] == [
        "log.wandb",
        "log.tensorboard",
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.method", "auto"),
        ("train.method", "full"),
        ("train.method", "galore"),
        ("train.method", "lora"),
        ("train.method", "qlora"),
        ("train.neftune_alpha", 5),
        ("data.format", "text"),
        ("data.bad_rows", "skip"),
        ("data.streaming", True),
        ("pin.sharding", "fsdp_grad_op"),
        ("pin.sharding", "hsdp"),
        ("pin.optimizer", "deepspeed_cpu_adam"),
        ("pin.optimizer", "adamw_8bit"),
        ("pin.offload", "optimizer"),
        ("pin.offload", "nvme_all"),
        ("pin.precision", "fp8"),
        ("pin.checkpointing", "selective"),
        ("pin.activation_offload", True),
        ("pin.compile", False),
        ("pin.compile", True),
        ("checkpoint.async", False),
        ("log.wandb", "off"),
        ("pin.loss", "chunked"),
        ("pin.loss", "fused_linear"),
    ],
)
def test_what_is_served_is_no_problem(path, value):
    assert later_problems(read_job(job_with(path, value), origin="job.yaml")) == ()


def test_every_row_names_a_setting_and_each_only_once():
    paths = [row.path for row in COMES_LATER]
    assert len(set(paths)) == len(paths)
    assert set(paths) <= set(BY_PATH)
