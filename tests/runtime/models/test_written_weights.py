"""What a run exports is read back from the disk and held against memory: nothing else gets the export's name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architecture_factory import TINY, VARIANTS
from attempt_runs import run_attempt
from engine_plan_factory import TINY_LLAMA
from rank_factory import rank_plan, write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from shardwise.trainer.runtime.export import folder as export_folder
from shardwise.trainer.runtime.models import weight_files
from shardwise.trainer.runtime.models.weight_files import check_model_written, check_written
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.strategy import Method

MODELS = TINY | {"llama, tied, wide heads": VARIANTS["llama, tied, wide heads"]}
WEIGHTS = {"a": torch.arange(60.0).reshape(20, 3), "b": torch.full((5,), float("nan")), "c": torch.tensor(7)}


def damage(path: Path, place: int = -10) -> None:
    """Another byte at a place, by default in the last tensor."""
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_every_model_is_found_and_one_other_byte_is_seen(name, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    check_model_written(tmp_path, model, model.state_dict())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    damage(files[-1])
    with pytest.raises(EnvironmentFaultError, match=rf"{files[-1].name}: .* has other values"):
        check_model_written(tmp_path, model, model.state_dict())


LIES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda path: save_file({"b": WEIGHTS["b"], "c": WEIGHTS["c"]}, path),
        "folder: .* 1 tensors are missing, the first a;",
    ),
    (lambda path: save_file(WEIGHTS | {"d": torch.zeros(1)}, path), "d is no weight of the model"),
    (lambda path: save_file(WEIGHTS | {"a": torch.zeros(3, 20)}, path), r"a has the shape \(3, 20\), it was \(20, 3\)"),
    (lambda path: save_file(WEIGHTS | {"a": WEIGHTS["a"].int()}, path), "a is torch.int32, it was torch.float32"),
    (lambda path: save_file(WEIGHTS | {"c": torch.tensor(8)}, path), "c has other values"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it cannot be read: "),
    (lambda path: damage(path, 12), "it cannot be read: "),
    (lambda path: path.unlink(), "3 tensors are missing, the first a;"),
]


@pytest.mark.parametrize(("lie", "words"), LIES, ids=[words[:24] for _, words in LIES])
def test_what_the_disk_gives_back_is_told(lie, words, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    check_written(folder, WEIGHTS)
    lie(folder / "model.safetensors")
    with pytest.raises(EnvironmentFaultError, match=words) as caught:
        check_written(folder, WEIGHTS)
    assert "nothing was exported: check the disk" in str(caught.value)


@pytest.mark.parametrize("row", [0, 6, 19])
def test_a_tensor_is_read_in_slices_to_its_end(row, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "SLICE_BYTES", 7 * 3 * 4)  # 20 rows of it are three slices
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    check_written(tmp_path, WEIGHTS)
    other = WEIGHTS["a"].clone()
    other[row, 1] += 1
    with pytest.raises(EnvironmentFaultError, match="a has other values"):
        check_written(tmp_path, WEIGHTS | {"a": other})


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_a_run_whose_disk_lies_fails_with_its_checkpoint_and_keeps_no_export(method, tmp_path, monkeypatch):
    """The two functions that write safetensors files stand for the disk: both lose a bit of what they are given."""

    def write_and_lose(tensors, filename, metadata=None):
        save_file(tensors, filename, metadata=metadata)
        damage(Path(filename))

    monkeypatch.setattr(modeling_utils, "safe_save_file", write_and_lose)
    monkeypatch.setattr(export_folder, "save_file", write_and_lose)
    plan = rank_plan(
        write_rows(tmp_path / "rows"), method=method, train={"lora": LoraJob(rank=4)}, model_config=TINY_LLAMA,
        num_steps=2, micro_batch=8, accumulation=1,
    )  # fmt: skip
    state = RunState()
    with pytest.raises(EnvironmentFaultError, match=r"safetensors: what was written is not what the disk gives back"):
        run_attempt(tmp_path / "run", plan, state=state)
    assert (state.export, state.checkpoint) == (None, "checkpoints/step-00000002")
    assert not [path for path in (tmp_path / "run").iterdir() if "export" in path.name]
    retained = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert load_file(next(retained.glob("*.safetensors")))
