"""The attention that a plan takes is one that transformers has for the model, and the model is built with it."""

from pathlib import Path

import pytest
from architecture_factory import TINY, VARIANTS
from estimate_factory import config
from msgspec.structs import replace
from planning_factory import context_for, data_of, job_of, machine, plan_of
from rank_factory import rank_plan

from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.planner import check_pins
from shardwise.trainer.planning.search.configurations import attention, first_configuration
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Precision

CONFIGS = {**TINY, "falcon rw": VARIANTS["falcon rw"]}
MACHINES = {
    "without flash-attn": machine("1xRTX-4090"),
    "with flash-attn": machine("1xRTX-4090", libraries=("flash_attn",)),
}


def context_of(model: str, hardware: Hardware, kernel: str | None = None, **pin: object) -> PlanningContext:
    job = job_of(seq_len=32, tokens_per_step=256, pin=pin)
    job = replace(job, model=replace(job.model, flash_kernel=kernel))
    return replace(context_for("tiny", hardware, job=job), shape=read_model_shape(CONFIGS[model]))


KERNEL = "kernels-community/flash-attn2@0123456789abcdef0123456789abcdef01234567"
WITH_KERNELS = machine("1xRTX-4090", libraries=("kernels",))
UNFIT = replace(
    machine("1xRTX-4090"),
    unfit_libraries={"kernels": "kernels 0.17.2 is installed; transformers 5.23.0 takes >=0.18.2"},
)


@pytest.mark.parametrize("hardware", MACHINES)
@pytest.mark.parametrize("model", CONFIGS)
def test_the_attention_is_one_of_the_models(model, hardware):
    context = context_of(model, MACHINES[hardware])
    taken, _ = attention(context, Precision.BF16_MIXED)
    assert taken in context.shape.attentions
    best = next(each for each in Attention if each in context.shape.attentions)
    if hardware == "with flash-attn":
        assert taken is (Attention.FLASH if Attention.FLASH in context.shape.attentions else best)


@pytest.mark.parametrize(("model", "words"), [("mpt", "flash-attn cannot"), ("gemma2", "flash-attn is not installed")])
def test_a_model_without_torchs_attention_takes_its_own_and_says_why(model, words):
    taken, why = attention(context_of(model, MACHINES["without flash-attn"]), Precision.BF16_MIXED)
    assert taken is Attention.EAGER
    assert why is not None and f"for {model}" in why and words in why


@pytest.mark.parametrize("model", ["llama", "gemma2", "mpt", "falcon rw"])
def test_the_model_is_built_with_the_attention_of_its_plan(model):
    from shardwise.trainer.runtime.attention.choice import attention_name, attention_of
    from shardwise.trainer.runtime.models.build import build_model

    data = data_of(seq_len=32, vocab_size=200)
    chosen = plan_of(CONFIGS[model], "1xRTX-4090", data=data, seq_len=32, tokens_per_step=256).chosen
    plan = rank_plan(Path("nowhere"), model_config=CONFIGS[model], attention=chosen.attention, loss=chosen.loss)
    assert attention_of(build_model(plan)) == attention_name(chosen.attention)


@pytest.mark.parametrize(
    ("hardware", "kernel", "taken", "words", "runs"),
    [
        (WITH_KERNELS, KERNEL, Attention.FLASH, KERNEL, KERNEL),
        (MACHINES["with flash-attn"], KERNEL, Attention.FLASH, "flash-attn is installed", None),
        (WITH_KERNELS, None, Attention.SDPA, "flash-attn is not installed", None),
        (MACHINES["without flash-attn"], KERNEL, Attention.SDPA, "-m pip install 'shardwise[hub-kernels]'", None),
        (UNFIT, KERNEL, Attention.SDPA, "kernels 0.17.2 is installed; transformers 5.23.0 takes >=0.18.2", None),
        (machine("1xV100-32GB", libraries=("kernels",)), KERNEL, Attention.SDPA, None, None),
        (machine("cpu", libraries=("kernels",)), KERNEL, Attention.SDPA, "flash-attn needs a GPU", None),
    ],
)  # fmt: skip
def test_a_kernel_of_the_hub_is_taken_where_the_job_names_it_without_flash_attn(hardware, kernel, taken, words, runs):
    context = context_of("llama", hardware, kernel)
    found, why = attention(context, Precision.BF16_MIXED)
    assert found is taken
    assert words is None or words in why
    row = next(row for row in CATALOGUE if row.precision is Precision.BF16_MIXED)
    configuration = first_configuration(context, row, checkpointing=Checkpointing.NONE, loss=LossHead.EAGER)
    assert (configuration.attention, configuration.flash_kernel) == (taken, runs)


def test_a_pin_of_flash_runs_the_kernel_that_the_job_names_in_16_bit():
    assert attention(context_of("llama", WITH_KERNELS, KERNEL), Precision.FP32)[0] is Attention.SDPA
    context = context_of("llama", WITH_KERNELS, KERNEL, attention=Attention.FLASH)
    check_pins(context)
    taken, why = attention(context, Precision.BF16_MIXED)
    assert taken is Attention.FLASH
    assert why is not None and "pin.attention: flash" in why and KERNEL in why


FLASH, THERE = Attention.FLASH, MACHINES["with flash-attn"]


@pytest.mark.parametrize(
    ("model", "hardware", "kernel", "pinned", "words"),
    [
        ("gemma2", THERE, None, Attention.SDPA, "flash and eager .*gemma2"),
        ("mpt", THERE, None, FLASH, "eager .*mpt"),
        ("falcon rw", THERE, None, FLASH, "sdpa and eager .*falcon"),
        ("llama", WITH_KERNELS, None, FLASH, ".*sdpa.*model.flash_kernel"),
        ("llama", UNFIT, KERNEL, FLASH, "kernels 0.17.2 .*>=0.18.2 .*pip install 'shardwise.hub-kernels.'.*sdpa"),
        ("llama", machine("cpu", libraries=("kernels",)), None, FLASH, "flash-attn needs a GPU.*sdpa"),
    ],
)
def test_a_pin_that_the_model_lacks_or_nothing_here_can_run_is_refused(model, hardware, kernel, pinned, words):
    with pytest.raises(InputError, match=rf"^pin\.attention: {pinned} .*{words}$"):
        check_pins(context_of(model, hardware, kernel, attention=pinned))


def test_grouped_heads_make_a_model_no_slower_on_a_chip_without_flash_attention():
    """A T4 and rows of 4,096: fewer key and value heads are fewer weights, gradients and products."""
    job = job_of(seq_len=4096, tokens_per_step=32768, pin={"compile": False, "loss": LossHead.CHUNKED})
    data = data_of(seq_len=4096, is_packed=False)
    models = (config(32000, 2048, 5632, 8, 32, kv_heads, max_position_embeddings=4096) for kv_heads in (8, 32))
    grouped, larger = (plan_of(fields, "1xT4", job=job, data=data).chosen for fields in models)
    assert grouped.speed.tokens_per_s_per_gpu >= larger.speed.tokens_per_s_per_gpu
    assert grouped.memory.need_bytes <= larger.memory.need_bytes
    assert grouped.checkpointing is larger.checkpointing
