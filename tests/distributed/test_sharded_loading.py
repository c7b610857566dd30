"""Weights that are loaded straight into shards: the bits of a whole build, and never the memory of one."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from architecture_factory import TINY
from custom_model import CONFIG, MARKER, code_of, transformers_as_it_was, write_custom_model
from engine_plan_factory import TINY_LLAMA
from estimate_factory import configuration as configuration_of
from estimate_factory import cpu
from msgspec.structs import replace
from rank_factory import rank_plan
from safetensors.torch import load_file, save_file
from stored_models import FP8_EXPERTS, GPT_OSS, SIZES, as_bnb, as_fp8, as_mxfp4
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.trainer.planning.memory.states import loading_bytes
from shardwise.trainer.planning.policy.precision_policy import dims_of, policy_of
from shardwise.trainer.runtime.checkpoint import read_weights
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.simulation.describe import describe
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.model.shape import DescriptionRequest
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Method, Precision, Quant
from shardwise.trainer.spec.units import MIB

MIXED, BF16 = Precision.BF16_MIXED, Precision.BF16
TIED = {**TINY_LLAMA, "tie_word_embeddings": True, "attention_bias": True}
EXPERTS = {**TINY["mixtral"], "vocab_size": 256}  # six experts, of which transformers makes one tensor
NARROW = {"lora": LoraJob(rank=1)}  # adapters of a single row: one rank's shard is empty
DORA = {"lora": LoraJob(rank=2, dora=True)}
# Some 145 MB in fp32; its largest tensor, and the largest that is drawn at once, is an embedding of 8.4 MB.
BIG = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
SAVED_MODEL = {**BIG, "num_hidden_layers": 6}
SLACK = 12 * 2**20  # modules without memory, the tables of files, what the heap keeps
SAVING_SLACK = 20 * MIB  # blocks of 4 MiB on their way to the disk and back, and what the heap keeps


@dataclass(frozen=True, eq=False)
class Start:
    sharding: Sharding
    config: Mapping[str, Any] = field(default_factory=lambda: TINY_LLAMA)
    precision: Precision = Precision.FP32
    method: Method = Method.FULL
    train: Mapping[str, Any] = field(default_factory=dict)
    offload: Offload = Offload.NONE
    stored: Callable[[Path], object] | None = None  # the format that the weights are put into

    def __str__(self) -> str:
        words = (self.sharding, self.offload, self.config["model_type"], self.precision, self.method)
        kind = "tied" if self.config is TIED else "untied"
        more = (*("dora" for _ in self.train if self.train is DORA), *([self.stored.__name__] if self.stored else ()))
        return "-".join(map(str, (*words, kind, *more)))


class Look(NamedTuple):
    """One attempt of `loading_worker`, which lists the kinds: of weights that are read from a folder, or drawn."""

    kind: str
    start: Start
    origin: str = "read"
    num_ranks: int = 2


def in_4_bit(folder: Path) -> None:
    as_bnb(folder.rename(folder.with_suffix(".plain")), folder)


def in_a_model_with_vision(folder: Path) -> None:
    """The folder of a Qwen2.5-VL whose text part has these weights, as such models are published."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    named = {f"model.language_model.{name.removeprefix('model.')}": each for name, each in tensors.items()}
    named["lm_head.weight"] = named.pop("model.language_model.lm_head.weight")
    save_file({**named, "model.visual.norm.weight": torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})
    outer = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    part = {**config, "model_type": "qwen2_5_vl_text"}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": part, "tie_word_embeddings": False}))


SHARDINGS = FSDP, ZERO3 = Sharding.FSDP, Sharding.ZERO3
READ = (
    Start(FSDP),
    Start(FSDP, EXPERTS),
    Start(FSDP, method=Method.LORA, precision=MIXED, train=NARROW),
    Start(FSDP, TIED, method=Method.QLORA, precision=Precision.FP16_MIXED),
    Start(ZERO3, TIED, MIXED),
    Start(ZERO3, EXPERTS, offload=Offload.OPTIMIZER_PARAMS),
    Start(ZERO3, method=Method.LORA, precision=MIXED, train=NARROW),
)
STORED = (
    Start(FSDP, FP8_EXPERTS, MIXED, stored=as_fp8),
    Start(ZERO3, GPT_OSS, BF16, stored=as_mxfp4),
    Start(FSDP, {**SIZES, "model_type": "llama"}, MIXED, Method.QLORA, NARROW, stored=in_4_bit),
    Start(ZERO3, {**SIZES, "model_type": "qwen2"}, MIXED, Method.LORA, NARROW, stored=in_a_model_with_vision),
)
FSDP_TIED = Start(FSDP, TIED, MIXED)
DRAWN = (READ[0], READ[3], Start(ZERO3), Start(ZERO3, EXPERTS, BF16))
MORE_READ = (
    Start(Sharding.FSDP_GRAD_OP, EXPERTS, BF16),
    Start(FSDP, EXPERTS, MIXED, Method.QLORA, NARROW),
    FSDP_TIED,
    Start(FSDP, method=Method.LORA, precision=MIXED, train=DORA),
    Start(ZERO3, method=Method.LORA, train=DORA),
)
STARTS = [*(Look("start", each) for each in (*READ, *STORED)), *(Look("start", each, "drawn") for each in DRAWN)]
MORE_STARTS = [
    *(Look("start", each) for each in (*MORE_READ, *DRAWN[2:])),
    *(Look("start", each, "drawn") for each in (FSDP_TIED, READ[1], READ[4])),
]
LARGE, LARGE_ZERO3 = Start(FSDP, BIG), Start(ZERO3, BIG)
PEAKS = [
    Look("peak", LARGE, "drawn"), Look("peak", LARGE), Look("peak", LARGE_ZERO3),
    Look("peak", Start(FSDP, BIG, stored=as_fp8)),
]  # fmt: skip
SAVES = [Look("save", Start(each, SAVED_MODEL), "drawn") for each in SHARDINGS]
CUSTOM = [Look("start", Start(each, CONFIG)) for each in SHARDINGS]
OF_FOUR = [Look("start", each, num_ranks=4) for each in (READ[0], DRAWN[2])]


def plan_of(look: Look, cache_dir: Path, folder: Path) -> Plan:
    start, is_custom = look.start, look.start.config is CONFIG
    few: dict[str, Any] = {"num_steps": 1, "sequences_per_step": 2} if look.kind == "save" else {}
    plan = rank_plan(
        cache_dir, start.sharding, start.offload, num_ranks=look.num_ranks, micro_batch=1 if few else 2, accumulation=1,
        model_config=start.config, precision=start.precision, method=start.method, train=start.train,
        checkpointing=Checkpointing.FULL if is_custom else Checkpointing.NONE,
        attention=Attention.EAGER if start.config is GPT_OSS else Attention.SDPA, **few,
    )  # fmt: skip
    data = replace(plan.data, num_eval_rows=0 if few else plan.data.num_eval_rows)
    path = None if look.origin == "drawn" else write_weights(folder, start)
    plan = replace(plan, data=data, model_path=path and str(path))
    if path is not None and start.config is GPT_OSS:  # no reader knows it
        return replace(plan, model_shape=describe(DescriptionRequest(model_config=dict(GPT_OSS), origin="config.json")))
    if path is None or not is_custom:
        shape = read_model_shape(dict(plan.model_config))
        return replace(plan, model_shape=replace(shape, quant=Quant.NF4_DQ if start.stored is in_4_bit else None))
    with transformers_as_it_was():
        request = DescriptionRequest(model_config=CONFIG, origin="config.json", model_code=code_of(path))
        shape = describe(request)
    packed = replace(data, is_packed=True)  # so that documents are looked at before the first step
    return replace(plan, model_code=code_of(path), model_shape=shape, data=packed)


def write_weights(folder: Path, start: Start) -> Path:
    """New weights in several files; or of code that comes with a model, and computes its buffers in its constructor."""
    config, is_large = start.config, start.config is BIG
    is_plain = is_large and start.stored is None
    path = folder / ("large" if is_plain else "custom" if config is CONFIG else str(start))
    if path.exists():
        return path
    if config is CONFIG:
        write_custom_model(path, recomputes_buffers=False)
        return path
    torch.manual_seed(3)
    fields = {name: value for name, value in config.items() if name != "model_type"}
    dtype = torch.bfloat16 if is_large else torch.float32  # in 16 bit they are cast as they are read
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=dtype)
    model.save_pretrained(path, max_shard_size=2**28 if is_large or start.stored else 2**18)
    if start.stored is not None:
        start.stored(path)
    return path


@pytest.fixture(scope="module")
def marker(tmp_path_factory) -> Path:
    """Where the code of a model leaves a line when it is executed."""
    return tmp_path_factory.mktemp("marker") / "marker"


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir, tmp_path_factory, marker) -> Iterator[Callable[[Look], Path]]:
    folder, few = tmp_path_factory.mktemp("weights"), [*PEAKS, *SAVES, *CUSTOM, *STARTS, *OF_FOUR]
    made = run_dirs(
        lambda look, _: plan_of(look, cache_dir, folder), few, MORE_STARTS,
        worker="loading_worker.py", kind=lambda look: f":{look.kind}",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARKER, str(marker))
        yield made


def answers(runs: Callable[[Look], Path], look: Look) -> list[dict[str, Any]]:
    files = [runs(look) / "attempts" / "1" / f"{look.kind}-{rank}.json" for rank in range(look.num_ranks)]
    return [json.loads(file.read_text()) for file in files]


def check_start(runs: Callable[[Look], Path], look: Look) -> None:
    for seen in answers(runs, look):
        assert (seen["differing"], seen["surplus"], seen["is_updated"]) == ([], [], True)
        assert seen["num_tensors"] >= 21
        assert seen["loads_by_tensor"] is not (look.start.method is Method.QLORA and look.origin == "drawn")


@pytest.mark.parametrize(
    "look",
    [*STARTS, *OF_FOUR, *(pytest.param(look, marks=pytest.mark.long) for look in MORE_STARTS)],
    ids=lambda look: f"{look.start}-{look.origin}{'-x4' * (look.num_ranks == 4)}",
)
def test_the_weights_of_the_shards_are_bit_by_bit_those_of_a_whole_build(look, runs):
    check_start(runs, look)


@pytest.mark.parametrize("look", CUSTOM, ids=SHARDINGS)
def test_the_shards_of_a_model_with_code_of_its_own_are_those_of_a_whole_build(look, runs, marker):
    check_start(runs, look)
    # Each rank runs each file of a model once.
    lines = marker.read_text().splitlines()
    num_ranks = len({line.split()[0] for line in lines})
    assert num_ranks in (2, 4), "of one process group; of few tests, of one for each engine"
    assert len(lines) == len(set(lines)) == 3 * num_ranks


@pytest.mark.parametrize("look", SAVES, ids=SHARDINGS)
def test_saving_and_loading_take_a_few_blocks_beside_what_an_engine_holds(look, runs):
    """No rank that holds parts of a model ever holds all of it, neither while it saves nor while it resumes."""
    weights = read_weights(open_checkpoint(runs(look) / "checkpoints" / "step-00000001"))
    whole = sum(weight.numel() * 4 for weight in weights.values())
    assert whole > 4 * SAVING_SLACK, "a rank that held the model would be seen"
    for seen in answers(runs, look):
        assert 0.95 * whole < seen["kept"] < 1.1 * whole + SAVING_SLACK, "half of both moments"
        assert seen["loading"] < SAVING_SLACK
        assert seen["saving"] < SAVING_SLACK


@pytest.mark.parametrize("look", PEAKS, ids=lambda look: f"{look.start.sharding}-{look.origin}")
def test_no_rank_ever_holds_more_than_its_shard_and_two_tensors(look, runs):
    """The planner's host RAM of loading, beside the shard, which is on the device where there is one."""
    shape = read_model_shape({**BIG, "max_position_embeddings": 48})
    configuration = configuration_of(look.start.sharding, precision=Precision.FP32, num_ranks=2)
    whole, shard = 4 * shape.num_parameters, 4 * shape.num_parameters / 2
    needed = loading_bytes(configuration, policy_of(configuration, cpu(2), dims_of(shape)), dims_of(shape))
    bound = shard + needed + SLACK
    assert bound < 0.75 * whole, "a rank that held the model would be seen"
    for seen in answers(runs, look):
        assert shard <= seen["end"] <= seen["peak"] < bound
