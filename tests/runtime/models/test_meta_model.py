"""Weights tensor by tensor, drawn or read from a folder: bit by bit those of a model that is built as a whole."""

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architecture_factory import TINY, VARIANTS
from attempt_runs import run_attempt
from engine_plan_factory import TINY_LLAMA
from rank_factory import rank_plan, write_rows
from safetensors.torch import load_file, save_file
from small_disk import flip_bit
from torch import nn

from shardwise.launch.inputs.model_check import is_usual
from shardwise.launch.inputs.weight_files import check_weights
from shardwise.trainer.runtime.export import folder as export_folder
from shardwise.trainer.runtime.models import weight_files
from shardwise.trainer.runtime.models.build import model_from_config
from shardwise.trainer.runtime.models.meta_model import (
    MetaModel,
    StoredModel,
    draw,
    is_placeholder,
    meta_model_from_config,
    meta_model_from_folder,
    plan_initialization,
)
from shardwise.trainer.runtime.models.weight_files import WeightReader, check_model_written, check_written
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.strategy import Attention, Method

ALL = {**TINY, **VARIANTS}


def build_of(config: dict[str, object]) -> Callable[[], transformers.PreTrainedModel]:
    is_fused = Attention.SDPA in read_model_shape(config).attentions
    attention = Attention.SDPA if is_fused else Attention.EAGER
    return partial(model_from_config, config, dtype=torch.float32, attention=attention)


def whole_model(build: Callable[[], transformers.PreTrainedModel]) -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    torch.manual_seed(7)
    return build(), torch.get_rng_state()


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_every_tensor_and_the_generator_are_those_of_a_whole_build(config):
    build = build_of(config)
    whole, state = whole_model(build)
    drawing = plan_initialization(build)
    assert drawing is not None
    delivered: dict[str, torch.Tensor] = {}

    def put(name: str, tensor: torch.Tensor) -> None:
        assert name not in delivered, "each is complete when it comes"
        delivered[name] = tensor.clone()
        torch.rand(3)  # the receiver may use the generator too

    torch.manual_seed(7)
    draw(build, drawing, put)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        assert torch.equal(delivered[name], tensor), name


def delivered_by(meta_model: MetaModel) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    meta_model.source.deliver(lambda name, values: found.update({name: values.whole().clone()}))
    return found


class OwnConfig(transformers.PreTrainedConfig):
    model_type = "own"


class Computed(transformers.PreTrainedModel):
    """A model with a value that only its constructor knows."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(4, 3)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))
        self.post_init()


class Dependent(Computed):
    """A model whose initialisation reads what is there."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            self.slopes.data.mul_(self.layer.weight.data.abs().mean())


@pytest.mark.parametrize("kind", [Computed, Dependent])
def test_a_model_that_cannot_be_drawn_by_tensors_is_built_as_a_whole(kind):
    def build() -> transformers.PreTrainedModel:
        return kind(OwnConfig())

    assert plan_initialization(build) is None
    meta_model = meta_model_from_config(build, dtype=torch.float32, seed=7)
    found = delivered_by(meta_model)
    whole, _ = whole_model(build)
    assert found.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in whole.named_parameters())


LLAMA = TINY["llama"]
# The weights of a folder are fp32; bf16 casts each as it is read.
CASES = [*((name, torch.bfloat16) for name in TINY), *((name, torch.float32) for name in ("llama", "gpt2", "mixtral"))]


def write_folder(folder: Path, config: dict[str, Any], *, max_shard_size: int = 2**16) -> transformers.PreTrainedModel:
    """New weights of a config in several files, with norms and biases that are not all ones and zeros."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def reader_of(folder: Path, dtype: torch.dtype = torch.float32) -> WeightReader:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder), dtype=dtype
        )
    types = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
    return WeightReader(model, str(folder), types=types)


def skeleton_of(folder: Path, dtype: torch.dtype = torch.float32) -> MetaModel:
    config = transformers.AutoConfig.from_pretrained(folder)
    return meta_model_from_folder(StoredModel(str(folder), config), dtype=dtype, attention="eager")


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        write_folder(path, TINY[name])
        return path

    return folder


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_skeleton_its_tensors_and_any_of_their_rows_are_those_that_from_pretrained_loads(name, dtype, folder_of):
    folder = folder_of(name)
    reader, meta_model, model = reader_of(folder, dtype), skeleton_of(folder, dtype), loaded(folder, dtype)
    assert is_usual(check_weights(folder), read_model_shape(TINY[name])), "so that a plan compares nothing"
    ours, theirs = dict(meta_model.model.named_parameters()), dict(model.named_parameters())
    assert [(n, p.shape, p.dtype) for n, p in ours.items()] == [(n, p.shape, p.dtype) for n, p in theirs.items()]
    assert all(is_placeholder(parameter) and parameter.untyped_storage().nbytes() <= 4 for parameter in ours.values())
    torch.testing.assert_close(dict(meta_model.model.named_buffers()), dict(model.named_buffers()), rtol=0, atol=0)
    filled, tensors = delivered_by(meta_model), model.state_dict()
    assert filled.keys() == meta_model.wanted.keys() and tensors.keys() >= set(reader.names)
    for name, tensor in meta_model.wanted.items():
        assert torch.equal(filled[name].to(tensor.dtype), tensors[name])
    for name in reader.names:
        assert torch.equal(reader.read(name).to(tensors[name].dtype), tensors[name])
        num_rows = tensors[name].shape[0]
        for ends in ((0, num_rows // 2), (num_rows // 2, num_rows), (1, 2)):
            assert torch.equal(reader.read_rows(name, *ends).to(tensors[name].dtype), tensors[name][slice(*ends)])


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_rows_of_stacked_experts_are_read_without_the_other_experts(model_type, folder_of, monkeypatch):
    reader = reader_of(folder_of(model_type))
    stacked = [name for name in reader.names if "experts." in name and reader.read(name).dim() == 3]
    read: list[int] = []
    stack = torch.stack

    def note(parts, dim):
        read.append(len(parts))
        return stack(parts, dim)

    monkeypatch.setattr(torch, "stack", note)
    assert len(stacked) == 2 * 3
    assert reader.read_rows(stacked[0], 2, 4).shape[0] == 2
    assert set(read) == {2}


def spoil(folder: Path, change) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_head_that_is_in_the_file_is_tied_where_it_is_the_embedding_also_where_it_stands_for_it(tmp_path):
    write_folder(tmp_path, {**LLAMA, "tie_word_embeddings": True}, max_shard_size=2**30)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    for added in (0, 1):
        spoil(tmp_path, lambda tensors, added=added: tensors.update({head: tensors[embedding] + added}))
        meta_model = skeleton_of(tmp_path)
        for model in (meta_model.model, loaded(tmp_path)):
            assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is not bool(added)
        assert (head in meta_model.wanted) is bool(added)
    spoil(tmp_path, lambda tensors: tensors.pop(embedding))
    meta_model = skeleton_of(tmp_path)
    assert meta_model.wanted[head] is meta_model.model.get_input_embeddings().weight
    assert embedding not in meta_model.wanted


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}), r"model\.norm.*\(63,\).*\(64,\)"),
    ],
)
def test_a_weight_that_is_missing_or_of_another_shape_is_named_and_so_is_a_damaged_file(change, fact, tmp_path):
    write_folder(tmp_path, LLAMA, max_shard_size=2**30)
    spoil(tmp_path, change)
    with pytest.raises(InputError, match=fact):
        skeleton_of(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        skeleton_of(tmp_path)


MODELS = TINY | {"llama, tied, wide heads": VARIANTS["llama, tied, wide heads"]}
WEIGHTS = {"a": torch.arange(60.0).reshape(20, 3), "b": torch.full((5,), float("nan")), "c": torch.tensor(7)}


def one_more(row: int) -> torch.Tensor:
    return WEIGHTS["a"].index_add(0, torch.tensor([row]), torch.ones(1, 3))


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_every_model_is_found_and_one_other_byte_is_seen(name, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**MODELS[name]))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    check_model_written(tmp_path, model, model.state_dict())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    flip_bit(files[-1], -10)
    with pytest.raises(EnvironmentFaultError, match=rf"{files[-1].name}: .* has other values"):
        check_model_written(tmp_path, model, model.state_dict())


LIES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda path: save_file({each: WEIGHTS[each] for each in "bc"}, path),
        "folder: .* 1 tensors are missing, the first a;",
    ),
    (lambda path: save_file(WEIGHTS | {"d": torch.zeros(1)}, path), "d is no weight of the model"),
    (lambda path: save_file(WEIGHTS | {"a": torch.zeros(3, 20)}, path), r"a has the shape \(3, 20\), it was \(20, 3\)"),
    (lambda path: save_file(WEIGHTS | {"a": WEIGHTS["a"].int()}, path), "a is torch.int32, it was torch.float32"),
    (lambda path: save_file(WEIGHTS | {"c": torch.tensor(8)}, path), "c has other values"),
    *(
        (lambda path, row=row: save_file(WEIGHTS | {"a": one_more(row)}, path), "a has other values")
        for row in (0, 6, 19)
    ),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it cannot be read: "),
    (lambda path: flip_bit(path, 12), "it cannot be read: "),
    (lambda path: path.unlink(), "3 tensors are missing, the first a;"),
]


@pytest.mark.parametrize(("lie", "words"), LIES)
def test_what_the_disk_gives_back_is_told(lie, words, tmp_path, monkeypatch):
    """A tensor is read in slices to its end."""
    monkeypatch.setattr(weight_files, "SLICE_BYTES", 7 * 3 * 4)  # 20 rows are three slices
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    check_written(folder, WEIGHTS)
    lie(folder / "model.safetensors")
    with pytest.raises(EnvironmentFaultError, match=words) as caught:
        check_written(folder, WEIGHTS)
    assert "nothing was exported: check the disk" in str(caught.value)


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_a_run_whose_disk_lies_fails_with_its_checkpoint_and_keeps_no_export(method, tmp_path, monkeypatch):
    """The two functions that write safetensors files stand for the disk: both lose a bit of what they are given."""

    def write_and_lose(tensors, filename, metadata=None):
        save_file(tensors, filename, metadata=metadata)
        flip_bit(Path(filename), -10)

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", write_and_lose)
    monkeypatch.setattr(export_folder, "save_file", write_and_lose)
    plan = rank_plan(
        write_rows(tmp_path / "rows"), method=method, train={"lora": LoraJob(rank=4)}, model_config=TINY_LLAMA,
        num_steps=2, micro_batch=8, accumulation=1,
    )  # fmt: skip
    state, run_dir = RunState(), tmp_path / "run"
    with pytest.raises(EnvironmentFaultError, match=r"safetensors: what was written is not what the disk gives back"):
        run_attempt(run_dir, plan, state=state)
    assert (state.export, state.checkpoint) == (None, "checkpoints/step-00000002")
    assert not [path for path in run_dir.iterdir() if "export" in path.name]
    assert load_file(next((run_dir / "checkpoints" / "step-00000002").glob("*.safetensors")))


def test_weights_that_a_model_keeps_in_fp32_are_read_so(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["layernorm"])
    write_folder(tmp_path, LLAMA)
    model = loaded(tmp_path, torch.bfloat16)
    skeleton = skeleton_of(tmp_path, torch.bfloat16).model
    types = {name: parameter.dtype for name, parameter in skeleton.named_parameters()}
    assert types == {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert set(types.values()) == {torch.float32, torch.bfloat16}
