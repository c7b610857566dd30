"""Rungs are written as in a job file, and what would change the comparison is none."""

import pytest
from msgspec.structs import replace
from planning_factory import machine

from shardwise.launch.run.ladder import default_rungs, parse_rungs
from shardwise.trainer.spec.errors import InputError


@pytest.mark.parametrize(
    ("word", "settings"),
    [
        ("bf16-mixed", {"pin.precision": "bf16-mixed"}),
        ("qlora", {"train.method": "qlora"}),
        ("compile", {"pin.compile": "true"}),
        ("loss=eager", {"pin.loss": "eager"}),
        ("micro_batch=2", {"pin.micro_batch": "2"}),
        ("lora+train.lora.rank=4", {"train.method": "lora", "train.lora.rank": "4"}),
    ],
)
def test_a_rung_is_what_it_would_be_in_a_job_file(word, settings):
    (rung,) = parse_rungs(word)
    assert (rung.name, rung.settings) == (word, settings)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("fp32,eager", "attention=eager or loss=eager"),
        ("chunkd", r"did you mean chunked\?"),
        ("data.train=other", r"data\.train"),
        ("", "technique"),
    ],
)
def test_what_is_no_rung_is_answered_with_what_would_be(text, fact):
    with pytest.raises(InputError, match=fact):
        parse_rungs(text)


def test_the_default_rungs_compute_in_what_the_card_has():
    newest, old = default_rungs(machine("1xRTX-4090")), default_rungs(machine("1xT4"))
    assert [rung.name for rung in newest] == [
        "fp32", "bf16-mixed", "full", "sdpa", "flash", "chunked", "adamw_8bit", "lora", "qlora"
    ]  # fmt: skip
    assert [rung.name for rung in old][1] == "fp16-mixed"
    unknown = machine("1xT4")
    unknown = replace(unknown, gpus=tuple(replace(gpu, compute_capability=None) for gpu in unknown.gpus))
    assert default_rungs(unknown)[1].name == "bf16-mixed"
