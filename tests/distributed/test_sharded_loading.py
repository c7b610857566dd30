"""Weights that are loaded straight into shards: the bits of a whole build, and never the memory of one."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from architecture_factory import TINY
from custom_model import CONFIG, MARKER, code_of, write_custom_model
from engine_plan_factory import TINY_LLAMA
from estimate_factory import configuration as configuration_of
from estimate_factory import cpu, gpu
from msgspec.structs import replace
from rank_factory import rank_plan, write_attempt
from registered_code import transformers_as_it_was
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.trainer.planning.memory.precision_policy import dims_of, policy_of
from shardwise.trainer.planning.memory.states import loading_bytes
from shardwise.trainer.runtime.checkpoint import read_weights
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.simulation.describe import describe
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.model.shape import DescriptionRequest
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision
from shardwise.trainer.spec.units import MIB

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


SHARDINGS = FSDP, ZERO3 = Sharding.FSDP, Sharding.ZERO3
READ = (
    Start(FSDP),
    Start(FSDP, TIED, MIXED),
    Start(FSDP, EXPERTS),
    Start(FSDP, method=Method.LORA, precision=MIXED, train=NARROW),
    Start(FSDP, method=Method.LORA, precision=MIXED, train=DORA),
    Start(FSDP, TIED, method=Method.QLORA, precision=Precision.FP16_MIXED),
    Start(ZERO3, TIED, MIXED),
    Start(ZERO3, EXPERTS, offload=Offload.OPTIMIZER_PARAMS),
    Start(ZERO3, method=Method.LORA, precision=MIXED, train=NARROW),
    Start(ZERO3, method=Method.LORA, train=DORA),
)
DRAWN = (READ[0], READ[5], Start(ZERO3), Start(ZERO3, EXPERTS, BF16))
MORE_READ = (Start(Sharding.FSDP_GRAD_OP, EXPERTS, BF16), Start(FSDP, EXPERTS, MIXED, Method.QLORA, NARROW))
ORIGINS = [(start, origin) for starts, origin in ((READ, "read"), (DRAWN, "drawn")) for start in starts]
MORE_ORIGINS = [
    *((start, "read") for start in (*MORE_READ, *DRAWN[2:])),
    *((start, "drawn") for start in (READ[1], READ[2], READ[6])),
]
CUSTOM, SAVED = "custom code", "saving"


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
MEASURED = [(2, Sharding.FSDP, "drawn"), (2, Sharding.FSDP, "read"), (2, Sharding.ZERO3, "read")]
MORE_MEASURED = [(4, Sharding.FSDP, "read"), (4, Sharding.ZERO3, "read")]
SAVED_MODEL = {**BIG, "num_hidden_layers": 6}
SAVING_SLACK = 20 * MIB  # blocks of 4 MiB on their way to the disk and back, and what the heap keeps


class Looks:
    """Weights that the ranks start from and their peak memory, by name; one group of ranks serves a whole request."""

    def __init__(self, folder: Path, cache_dir: Path, start_ranks: Callable[[Sequence[str], int], str]) -> None:
        self.folder, self._cache_dir, self._start_ranks = folder, cache_dir, start_ranks
        # In 16 bit, as most are, so that weights are cast as they are read.
        self._large = str(write_weights(folder / "large", BIG, torch.bfloat16))

    def start(self, start: Start, origin: str, num_ranks: int = 2) -> str:
        plan = plan_of(start, self._cache_dir, num_ranks)
        weights = self.folder / f"weights {start.name} {num_ranks}"
        if origin == "read" and not weights.exists():
            write_weights(weights, plan.model_config, torch.float32)
        return self._argument(
            f"{num_ranks}-{start.name}-{origin}", plan, "start", weights if origin == "read" else None
        )

    def peak(self, num_ranks: int, sharding: Sharding, origin: str, kind: str = "peak") -> str:
        plan = rank_plan(self._cache_dir, sharding, num_ranks=num_ranks, model_config=BIG)
        return self._argument(
            f"{num_ranks}-{sharding}-{origin}", plan, kind, self._large if origin != "drawn" else None
        )

    def saving(self, sharding: Sharding) -> str:
        plan = rank_plan(
            self._cache_dir, sharding, num_ranks=2, micro_batch=1, accumulation=1, num_steps=1, sequences_per_step=2,
            model_config=SAVED_MODEL,
        )  # fmt: skip
        shape = read_model_shape(dict(plan.model_config))
        plan = replace(plan, model_shape=shape, data=replace(plan.data, num_eval_rows=0))
        return self._argument(f"{SAVED}-{sharding}", plan, "save", None)

    def custom(self, sharding: Sharding) -> str:
        """Code that comes with a model, and computes its buffers in its constructor only."""
        weights = self.folder / "custom"
        if not weights.exists():
            write_custom_model(weights, recomputes_buffers=False)
        with transformers_as_it_was():
            request = DescriptionRequest(model_config=CONFIG, origin="config.json", model_code=code_of(weights))
            shape = describe(request)
        plan = rank_plan(
            self._cache_dir, sharding, num_ranks=2, micro_batch=2, accumulation=1, model_config=CONFIG,
            checkpointing=Checkpointing.FULL,
        )  # fmt: skip
        packed = replace(plan.data, is_packed=True)  # so that documents are looked at before the first step
        plan = replace(plan, model_code=code_of(weights), model_shape=shape, data=packed)
        return self._argument(f"{CUSTOM}-{sharding}", plan, "start", weights)

    def _argument(self, name: str, plan: Plan, kind: str, weights: object) -> str:
        path = None if weights is None else str(weights)
        return f"{write_attempt(self.folder / name, replace(plan, model_path=path))}:{kind}"

    def take(self, arguments: Sequence[str], num_ranks: int) -> "Looks":
        self._start_ranks([str(WORKER), *arguments], num_ranks)
        return self

    def answer(self, name: str, kind: str, rank: int) -> dict[str, Any]:
        return json.loads((self.folder / name / "attempts" / "1" / f"{kind}-{rank}.json").read_text())


@pytest.fixture(scope="module")
def looks(tmp_path_factory, cache_dir, start_ranks) -> Looks:
    return Looks(tmp_path_factory.mktemp("looks"), cache_dir, start_ranks)


@pytest.fixture(scope="module")
def runs(looks, request) -> Looks:
    """The starts of the tests that run, and everything else where any test of another kind runs."""
    items = [item for item in request.session.items if item.path == request.path and "runs" in item.fixturenames]
    params = [getattr(item, "callspec", None) and item.callspec.params for item in items]
    origins = [(each["start"], each["origin"]) for each in params if each and "start" in each]
    arguments = list[str]()
    if len(items) > len(origins):
        arguments += [looks.peak(*group) for group in MEASURED]
        arguments += [looks.peak(2, FSDP, kind, kind) for kind in ("whole", "onto")]
        arguments += [looks.saving(sharding) for sharding in SHARDINGS]
        arguments += [looks.custom(sharding) for sharding in SHARDINGS]
    arguments += [looks.start(*origin) for origin in origins]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARKER, str(looks.folder / "marker"))
        return looks.take(arguments, 2)


def each_origin(origins: Sequence[tuple[Start, str]]):
    return pytest.mark.parametrize(
        ("start", "origin"), origins, ids=[f"{start.name}-{origin}" for start, origin in origins]
    )


def check_start(looks: Looks, start: Start, origin: str, num_ranks: int) -> None:
    for rank in range(num_ranks):
        seen = looks.answer(f"{num_ranks}-{start.name}-{origin}", "start", rank)
        assert (seen["differing"], seen["surplus"], seen["is_updated"]) == ([], [], True)
        assert seen["num_tensors"] >= 21
        assert seen["loads_by_tensor"] is not (start.method is Method.QLORA and origin == "drawn")


@each_origin(ORIGINS)
def test_the_weights_of_the_shards_are_bit_by_bit_those_of_a_whole_build(start, origin, runs):
    check_start(runs, start, origin, 2)


@pytest.mark.long
@each_origin(MORE_ORIGINS)
def test_so_they_are_of_more_models(start, origin, looks):
    check_start(looks.take([looks.start(start, origin)], 2), start, origin, 2)


def test_so_they_are_on_four_ranks(looks):
    starts = [Start(sharding) for sharding in SHARDINGS]
    looks.take([looks.start(start, "read", 4) for start in starts], 4)
    for start in starts:
        check_start(looks, start, "read", 4)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_shards_of_a_model_with_code_of_its_own_are_those_of_a_whole_build(sharding, runs):
    for rank in (0, 1):
        seen = runs.answer(f"{CUSTOM}-{sharding}", "start", rank)
        assert (seen["differing"], seen["surplus"], seen["is_updated"]) == ([], [], True)
        assert (seen["loads_by_tensor"], seen["num_tensors"]) == (True, 22)


def test_each_rank_runs_each_file_of_a_model_once(runs):
    lines = (runs.folder / "marker").read_text().splitlines()
    ranks = {line.split()[0] for line in lines}
    assert len(ranks) == 2
    assert len(lines) == len(set(lines)) == 6


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_saving_and_loading_take_a_few_blocks_beside_what_an_engine_holds(sharding, runs):
    """No rank that holds parts of a model ever holds all of it, neither while it saves nor while it resumes."""
    weights = read_weights(open_checkpoint(runs.folder / f"{SAVED}-{sharding}" / "checkpoints" / "step-00000001"))
    whole = sum(weight.numel() * 4 for weight in weights.values())
    assert whole > 4 * SAVING_SLACK, "a rank that held the model would be seen"
    for rank in (0, 1):
        seen = runs.answer(f"{SAVED}-{sharding}", "save", rank)
        assert 0.95 * whole < seen["kept"] < 1.1 * whole + SAVING_SLACK, "half of both moments"
        assert seen["loading"] < SAVING_SLACK
        assert seen["saving"] < SAVING_SLACK


@pytest.mark.parametrize(("num_ranks", "sharding", "origin"), MEASURED)
def test_no_rank_ever_holds_more_than_its_shard_and_two_tensors(num_ranks, sharding, origin, runs):
    check_peak(runs, num_ranks, sharding, origin)


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "sharding", "origin"), MORE_MEASURED)
def test_nor_does_one_of_four(num_ranks, sharding, origin, looks):
    check_peak(looks.take([looks.peak(4, sharding, origin)], 4), num_ranks, sharding, origin)


def check_peak(runs: Looks, num_ranks: int, sharding: Sharding, origin: str) -> None:
    """The planner's host RAM of loading, beside the shard, which is on the device where there is one."""
    shape = read_model_shape({**BIG, "max_position_embeddings": 48})
    configuration = configuration_of(sharding, precision=Precision.FP32, num_ranks=num_ranks)
    whole, shard = 4 * shape.num_parameters, 4 * shape.num_parameters / num_ranks
    needed = loading_bytes(configuration, policy_of(configuration, cpu(num_ranks), dims_of(shape)), dims_of(shape))
    bound = shard + needed + SLACK
    assert bound < 0.75 * whole, "a rank that held the model would be seen"
    for rank in range(num_ranks):
        seen = runs.answer(f"{num_ranks}-{sharding}-{origin}", "peak", rank)
        assert shard <= seen["end"] <= seen["peak"] < bound


def test_weights_that_go_to_a_device_one_by_one_need_two_tensors_more_than_the_device_holds(runs):
    """The device is the CPU here; a model that was built before it is copied would be held twice."""
    shape = read_model_shape({**BIG, "max_position_embeddings": 48})
    configuration = configuration_of(Sharding.DDP, precision=Precision.FP32, num_ranks=2)
    bound = loading_bytes(configuration, policy_of(configuration, gpu("2xRTX-4090"), dims_of(shape)), dims_of(shape))
    whole = 4 * shape.num_parameters
    assert bound + SLACK < 0.3 * whole
    for rank in (0, 1):
        seen = runs.answer(f"2-{FSDP}-onto", "onto", rank)
        assert 0.95 * whole < seen["end"] <= seen["peak"] < whole + bound + SLACK


def test_a_whole_build_holds_the_whole_model(runs):
    """As ZeRO-1 and ZeRO-2 have it: the tests above would see it, and it is there once."""
    whole = 4 * read_model_shape({**BIG, "max_position_embeddings": 48}).num_parameters
    for rank in (0, 1):
        seen = runs.answer(f"2-{FSDP}-whole", "whole", rank)
        assert 0.95 * whole < seen["peak"] < 1.1 * whole
