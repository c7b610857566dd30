"""Weights are checked by their headers: whatever was cut off, swapped or pickled is refused under the file's name."""

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.inputs.weight_files import check_weights, has_weights, holds_weights
from shardwise.trainer.spec.errors import InputError

TENSORS = {"model.embed_tokens.weight": (16, 4), "model.norm.weight": (4,)}


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in check_weights(folder).items()}


def header_of(tensors: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in tensors.items():
        end = begin + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    return header


def safetensors(header: Any, num_bytes: int = 272) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + b"\1" * num_bytes


def write_shards(folder: Path, **weight_map: str) -> None:
    """Two files of one tensor each, and an index with `weight_map` laid over the right one."""
    (folder / "a.safetensors").write_bytes(safetensors(header_of({"first": (4,)}), 16))
    (folder / "b.safetensors").write_bytes(safetensors(header_of({"second": (2, 2)}), 16))
    index = {"weight_map": {"first": "a.safetensors", "second": "b.safetensors", **weight_map}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def changed(name: str, **fields: Any) -> bytes:
    header = header_of(TENSORS)
    header[name] = {**header[name], **fields}
    return safetensors({key: value for key, value in header.items() if value is not None})


DAMAGED = {
    "empty file": (b"", "truncated"),
    "length beyond the file": (struct.pack("<Q", 10**6) + b"{}", "truncated"),
    "absurd length": (b"\xff" * 64, "truncated"),
    "no JSON": (safetensors(b"{broken"), "header"),
    "not UTF-8": (safetensors(b'{"\xff": 1}'), "header"),
    "a list": (safetensors([]), "header"),
    "too deep": (safetensors(b"[" * 100_000), "header"),
    "cut off": (safetensors(header_of(TENSORS), 200), "272 B of tensors, the file holds 200 B"),
    "too long": (safetensors(header_of(TENSORS), 280), " 8 bytes"),
    "unknown dtype": (changed("model.norm.weight", dtype="F1"), "at model.norm.weight"),
    "shape of another size": (changed("model.norm.weight", shape=[5]), "at model.norm.weight"),
    "negative shape": (changed("model.norm.weight", shape=[-2, -2]), "at model.norm.weight"),
    "offsets backwards": (changed("model.norm.weight", data_offsets=[272, 256]), "at model.norm.weight"),
    "one offset": (changed("model.norm.weight", data_offsets=[1]), "at model.norm.weight"),
    "text for a shape": (changed("model.norm.weight", shape="wide"), "at model.norm.weight"),
    "a number for a tensor": (safetensors({"w": 5}), "at w"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_each_damage_is_one_line_under_the_name_of_the_file(tmp_path, case):
    content, fact = DAMAGED[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError) as caught:
        check_weights(tmp_path)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'model.safetensors'}: ") and fact in line and "\n" not in line


def test_a_file_or_shards_together_answer_with_their_shapes_and_a_missing_one_is_named(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "model.safetensors").write_bytes(safetensors(header_of(TENSORS)))
    assert shapes_of(whole) == TENSORS and has_weights(whole)
    write_shards(tmp_path)
    assert shapes_of(tmp_path) == {"first": (4,), "second": (2, 2)}
    assert has_weights(tmp_path)
    write_shards(tmp_path, third="c.safetensors")
    assert not has_weights(tmp_path)
    with pytest.raises(InputError, match=r"c\.safetensors: .*model\.safetensors\.index\.json"):
        check_weights(tmp_path)
    write_shards(tmp_path, third="b.safetensors")
    with pytest.raises(InputError, match=r"b\.safetensors: .*third.*model\.safetensors\.index\.json"):
        check_weights(tmp_path)
    write_shards(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(safetensors(header_of({"second": (2, 2), "first": (4,)}), 32))
    with pytest.raises(InputError, match=r"b\.safetensors: holds first, as another file"):
        check_weights(tmp_path)


WEIGHT_MAPS = ("{}", "[]", '{"a": 1}', '{"a": "../../secret.safetensors"}')


@pytest.mark.parametrize("index", ["", "[]", "{}", *(f'{{"weight_map": {weight_map}}}' for weight_map in WEIGHT_MAPS)])
def test_a_damaged_index_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json: "):
        check_weights(tmp_path)


@pytest.mark.parametrize(
    ("file", "fact"),
    [
        ("pytorch_model.bin", "pickled .*:\nshardwise import 'FOLDER' 'FOLDER-plain'$"),
        ("adapter_config.json", "adapter.*:\nshardwise import 'FOLDER' 'FOLDER-merged' --base MODEL$"),
        ("consolidated.00.pth", r"consolidated\.00\.pth, which is not read, .* save_pretrained of transformers$"),
        ("consolidated.safetensors", r"consolidated\.safetensors, which is not read, .* save_pretrained"),
        ("model.fp16.safetensors", r"model\.fp16\.safetensors, which is not read"),
        ("model-Q4_K_M.gguf", r"model-Q4_K_M\.gguf, which is not read"),
        ("readme.md", r"holds no model\.safetensors and no .*; .* write model\.name=null 'model\.config=FOLDER'$"),
        ("training_args.bin", r"holds no model\.safetensors and no model\.safetensors\.index\.json;"),
    ],
)
def test_a_folder_without_weights_says_what_it_holds_instead_and_a_plan_refuses_other_forms(tmp_path, file, fact):
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / file).write_bytes(b"x")
    assert not has_weights(folder) and holds_weights(folder) == (not fact.startswith("holds no"))
    with pytest.raises(InputError) as caught:
        check_weights(folder)
    assert str(caught.value).startswith(f"{folder}: ")
    assert re.search(fact.replace("FOLDER", re.escape(str(folder))), str(caught.value), re.DOTALL)


def test_the_remedy_for_an_adapter_names_the_base_that_it_was_trained_on(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "ORG/Base"}')
    with pytest.raises(InputError, match=f"import {tmp_path} {tmp_path}-merged --base ORG/Base$"):
        check_weights(tmp_path)
