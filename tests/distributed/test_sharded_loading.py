"""Weights that are loaded straight into shards: the bits of a whole build, and never the memory of one."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from architecture_factory import TINY
from engine_plan_factory import TINY_LLAMA
from estimate_factory import configuration as configuration_of
from estimate_factory import cpu, gpu
from msgspec.structs import replace
from rank_factory import rank_plan, write_attempt
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.trainer.planning.memory.precision_policy import dims_of, policy_of
from shardwise.trainer.planning.memory.states import loading_bytes
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method, Precision

WORKER = Path(__file__).with_name("loading_worker.py")
MIXED, BF16 = Precision.BF16_MIXED, Precision.BF16
TIED = {**TINY_LLAMA, "tie_word_embeddings": True, "attention_bias": True}
EXPERTS = {**TINY["mixtral"], "vocab_size": 256}  # six experts, of which transformers makes one tensor
NARROW = {"lora": LoraJob(rank=1)}  # adapters of a single row: one rank's shard is empty
DORA = {"lora": LoraJob(rank=2, dora=True)}


class Start(NamedTuple):
    """One attempt of two ranks, from a config and from a folder of its weights."""

    sharding: Sharding
    config: Mapping[str, Any] = TINY_LLAMA
    precision: Precision = Precision.FP32
    method: Method = Method.FULL
    train: Mapping[str, Any] = {}
    offload: Offload = Offload.NONE

    @property
    def name(self) -> str:
        words = (self.sharding, self.offload, self.config["model_type"], self.precision, self.method)
        kind = "tied" if self.config is TIED else "untied"
        return "-".join(map(str, (*words, kind, *("dora" for _ in self.train if self.train is DORA))))


STARTS = {
    Sharding.FSDP: [
        Start(Sharding.FSDP),
        Start(Sharding.FSDP, TIED, MIXED),
        Start(Sharding.FSDP, EXPERTS),
        Start(Sharding.FSDP_GRAD_OP, EXPERTS, BF16),
        Start(Sharding.FSDP, method=Method.LORA, precision=MIXED, train=NARROW),
        Start(Sharding.FSDP, method=Method.LORA, precision=MIXED, train=DORA),
        Start(Sharding.FSDP, TIED, method=Method.QLORA, precision=Precision.FP16_MIXED),
        Start(Sharding.FSDP, EXPERTS, method=Method.QLORA, precision=MIXED, train=NARROW),
    ],
    Sharding.ZERO3: [
        Start(Sharding.ZERO3),
        Start(Sharding.ZERO3, TIED, MIXED),
        Start(Sharding.ZERO3, EXPERTS, BF16),
        Start(Sharding.ZERO3, EXPERTS, offload=Offload.OPTIMIZER_PARAMS),
        Start(Sharding.ZERO3, method=Method.LORA, precision=MIXED, train=NARROW),
        Start(Sharding.ZERO3, method=Method.LORA, train=DORA),
    ],
}


# Every start is read; drawn are those in which what is drawn differs.
ORIGINS = [
    *((start, "read") for group in STARTS.values() for start in group),
    *((start, "drawn") for group in STARTS.values() for start in group[:3]),
    (STARTS[Sharding.FSDP][6], "drawn"),
]


def plan_of(start: Start, cache_dir: Path, num_ranks: int) -> Plan:
    plan = rank_plan(
        cache_dir, start.sharding, start.offload, num_ranks=num_ranks, micro_batch=2, accumulation=1,
        model_config=start.config, precision=start.precision, method=start.method, train=start.train,
    )  # fmt: skip
    return replace(plan, model_shape=read_model_shape(dict(plan.model_config)))


def write_weights(folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> Path:
    """A folder of new weights of a config, in several files."""
    torch.manual_seed(3)
    fields = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=dtype)
    model.save_pretrained(folder, max_shard_size=2**28 if model.num_parameters() > 2**24 else 2**18)
    return folder


# Some 145 MB in fp32; its largest tensor, and the largest that is drawn at once, is an embedding of 8.4 MB.
BIG = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
SLACK = 12 * 2**20  # modules without memory, the tables of files, what the heap keeps
MEASURED = [
    (2, Sharding.FSDP, "drawn"),
    (2, Sharding.FSDP, "read"),
    (2, Sharding.ZERO3, "drawn"),
    (2, Sharding.ZERO3, "read"),
    (4, Sharding.FSDP, "read"),
    (4, Sharding.ZERO3, "read"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache_dir, start_ranks: Callable[[Sequence[str], int], str]) -> Path:
    """What ranks of every engine started from, and what they held at most; a group of ranks for each engine.

    The large files are in 16 bit, as most are, so that weights are cast as they are read.
    """
    folder = tmp_path_factory.mktemp("runs")
    large = write_weights(folder / "large", BIG, torch.bfloat16)
    for num_ranks, sharding in ((2, Sharding.FSDP), (2, Sharding.ZERO3), (4, Sharding.FSDP), (4, Sharding.ZERO3)):
        arguments = list[str]()
        for start in STARTS[sharding] if num_ranks == 2 else STARTS[sharding][:1]:
            drawn = plan_of(start, cache_dir, num_ranks)
            weights = write_weights(folder / f"{num_ranks}-{start.name}", drawn.model_config, torch.float32)
            for origin in (each for other, each in ORIGINS if other == start and (num_ranks == 2 or each == "read")):
                path = None if origin == "drawn" else str(weights)
                run_dir = folder / f"{num_ranks}-{start.name}-{origin}"
                arguments.append(f"{write_attempt(run_dir, replace(drawn, model_path=path))}:start")
        for origin in (origin for *group, origin in MEASURED if group == [num_ranks, sharding]):
            plan = rank_plan(cache_dir, sharding, num_ranks=num_ranks, model_config=BIG)
            path = None if origin == "drawn" else str(large)
            run_dir = folder / f"{num_ranks}-{sharding}-{origin}"
            arguments.append(f"{write_attempt(run_dir, replace(plan, model_path=path))}:peak")
        if (num_ranks, sharding) == (2, Sharding.FSDP):
            arguments += [
                f"{write_attempt(folder / kind, replace(plan, model_path=str(large)))}:{kind}"
                for kind in ("whole", "onto")
            ]
        start_ranks([str(WORKER), *arguments], num_ranks)
    return folder


def answer(run_dir: Path, kind: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "attempts" / "1" / f"{kind}-{rank}.json").read_text())
    return found


@pytest.mark.parametrize(("start", "origin"), ORIGINS, ids=[f"{start.name}-{origin}" for start, origin in ORIGINS])
def test_the_weights_of_the_shards_are_bit_by_bit_those_of_a_whole_build(start, origin, runs):
    for rank in (0, 1):
        seen = answer(runs / f"2-{start.name}-{origin}", "start", rank)
        assert (seen["differing"], seen["surplus"], seen["is_updated"]) == ([], [], True)
        assert seen["num_tensors"] >= 21
        assert seen["loads_by_tensor"] is not (start.method is Method.QLORA and origin == "drawn")


@pytest.mark.parametrize("sharding", STARTS)
def test_so_they_are_on_four_ranks(sharding, runs):
    for rank in range(4):
        seen = answer(runs / f"4-{STARTS[sharding][0].name}-read", "start", rank)
        assert (seen["differing"], seen["surplus"], seen["loads_by_tensor"]) == ([], [], True)


@pytest.mark.parametrize(("num_ranks", "sharding", "origin"), MEASURED)
def test_no_rank_ever_holds_more_than_its_shard_and_two_tensors(num_ranks, sharding, origin, runs):
    """The planner's host RAM of loading, beside the shard, which is on the device where there is one."""
    shape = read_model_shape({**BIG, "max_position_embeddings": 48})
    configuration = configuration_of(sharding, precision=Precision.FP32, num_ranks=num_ranks)
    whole, shard = 4 * shape.num_parameters, 4 * shape.num_parameters / num_ranks
    needed = loading_bytes(configuration, policy_of(configuration, cpu(num_ranks), dims_of(shape)), dims_of(shape))
    bound = shard + needed + SLACK
    assert bound < 0.75 * whole, "a rank that held the model would be seen"
    for rank in range(num_ranks):
        seen = answer(runs / f"{num_ranks}-{sharding}-{origin}", "peak", rank)
        assert shard <= seen["end"] <= seen["peak"] < bound


def test_weights_that_go_to_a_device_one_by_one_need_two_tensors_more_than_the_device_holds(runs):
    """The device is the CPU here; a model that was built before it is copied would be held twice."""
    shape = read_model_shape({**BIG, "max_position_embeddings": 48})
    configuration = configuration_of(Sharding.DDP, precision=Precision.FP32, num_ranks=2)
    bound = loading_bytes(configuration, policy_of(configuration, gpu("2xRTX-4090"), dims_of(shape)), dims_of(shape))
    whole = 4 * shape.num_parameters
    assert bound + SLACK < 0.3 * whole
    for rank in (0, 1):
        seen = answer(runs / "onto", "peak", rank)
        assert 0.95 * whole < seen["end"] <= seen["peak"] < whole + bound + SLACK


def test_a_whole_build_holds_the_whole_model(runs):
    """As ZeRO-1 and ZeRO-2 have it: the tests above would see it, and it is there once."""
    whole = 4 * read_model_shape({**BIG, "max_position_embeddings": 48}).num_parameters
    for rank in (0, 1):
        seen = answer(runs / "whole", "peak", rank)
        assert 0.95 * whole < seen["peak"] < 1.1 * whole
