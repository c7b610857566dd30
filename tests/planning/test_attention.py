"""The attention that a plan takes is one that transformers has for the model, and the model is built with it."""

from pathlib import Path

import pytest
from architecture_factory import TINY, VARIANTS
from msgspec.structs import replace
from planning_factory import data_of, job_of, machine, situation_for
from rank_factory import rank_plan

from trainer.planning.input_checks import check_pins
from trainer.planning.planner import make_plan
from trainer.planning.settings_choices import attention
from trainer.planning.situation import Situation
from trainer.spec.calibration import Calibration
from trainer.spec.errors import InputError
from trainer.spec.model_shape import read_model_shape
from trainer.spec.plan import Plan
from trainer.spec.strategy import Attention, Precision

CONFIGS = {**TINY, "falcon rw": VARIANTS["falcon rw"]}
MACHINES = {
    "without flash-attn": machine("1xRTX-4090"),
    "with flash-attn": machine("1xRTX-4090", libraries=("flash_attn",)),
}


def situation_of(model: str, hardware: str, **pin: object) -> Situation:
    job = job_of(seq_len=32, tokens_per_step=256, pin=pin)
    situation = situation_for("tiny", MACHINES[hardware], job=job)
    return replace(situation, shape=read_model_shape(CONFIGS[model]))


def plan_for(model: str) -> Plan:
    job = job_of(seq_len=32, tokens_per_step=256)
    return make_plan(
        job,
        name="test",
        hardware=MACHINES["without flash-attn"],
        shape=read_model_shape(CONFIGS[model]),
        model_config=CONFIGS[model],
        model_path=None,
        tokenizer_path=None,
        data=data_of(seq_len=32, vocab_size=200),
        calibration=Calibration(),
        versions={"shardwise": "0"},
    )


@pytest.mark.parametrize("hardware", MACHINES)
@pytest.mark.parametrize("model", CONFIGS)
def test_the_attention_is_one_of_the_models(model, hardware):
    situation = situation_of(model, hardware)
    taken, _ = attention(situation, Precision.BF16_MIXED)
    assert taken in situation.shape.attentions
    best = next(each for each in Attention if each in situation.shape.attentions)
    if hardware == "with flash-attn":
        assert taken is (Attention.FLASH if Attention.FLASH in situation.shape.attentions else best)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mpt", "transformers has eager attention for mpt; flash-attn cannot compute it"),
        ("gemma2", "transformers has flash and eager attention for gemma2; flash-attn is not installed"),
    ],
)
def test_a_model_without_torchs_attention_takes_its_own_and_says_why(model, words):
    situation = situation_of(model, "without flash-attn")
    assert attention(situation, Precision.BF16_MIXED) == (Attention.EAGER, words)


@pytest.mark.parametrize("model", CONFIGS)
def test_the_model_is_built_with_the_attention_of_its_plan(model):
    from trainer.runtime.attention import attention_name, attention_of
    from trainer.runtime.model import build_model

    chosen = plan_for(model).chosen
    plan = rank_plan(Path("nowhere"), model_config=CONFIGS[model], attention=chosen.attention, loss=chosen.loss)
    assert attention_of(build_model(plan)) == attention_name(chosen.attention)


@pytest.mark.parametrize(
    ("model", "pinned", "words"),
    [
        ("gemma2", Attention.SDPA, "transformers has flash and eager attention for gemma2"),
        ("mpt", Attention.FLASH, "transformers has eager attention for mpt"),
        ("falcon rw", Attention.FLASH, "transformers has sdpa and eager attention for falcon"),
    ],
)
def test_a_pin_that_the_model_does_not_have_is_refused(model, pinned, words):
    situation = situation_of(model, "with flash-attn", attention=pinned)
    with pytest.raises(InputError, match=rf"^pin\.attention: {pinned} cannot be taken: {words}$"):
        check_pins(situation)
