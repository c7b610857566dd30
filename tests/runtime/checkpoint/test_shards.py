"""Files of ranges: any cut of a tensor over any number of ranks reads back by any other cut."""

import json
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardwise.trainer.runtime.checkpoint import CheckpointFolder, Manifest, shards
from shardwise.trainer.runtime.checkpoint.manifest import (
    ParameterEntry,
    TensorEntry,
    check_manifest,
    covered_in_order,
    share_of_rank,
)
from shardwise.trainer.runtime.checkpoint.pieces import Piece, type_of
from shardwise.trainer.spec.errors import InputError

WEIGHT = torch.arange(7 * 11, dtype=torch.float32).reshape(7, 11)


def saved(tiny, folder: Path, cut: list[tuple[int, int]], weight: torch.Tensor) -> CheckpointFolder:
    """One parameter `w`, each range (start, count) written by a rank of its own, the ranks in reverse."""
    folder.mkdir(exist_ok=True)
    records: list[shards.ShardRecord] = []
    for rank, (start, count) in reversed(list(enumerate(cut))):
        own = [Piece("w", None, start, weight.view(-1)[start : start + count])] if count else []
        records += shards.write_shards(folder, own, rank=rank, world_size=len(cut), on_point=lambda point: None)
    chunks = tuple(placed.chunk for record in records for placed in record.placed)
    entry = ParameterEntry(weight=TensorEntry(shape=tuple(weight.shape), type=type_of(weight), chunks=chunks))
    files = {record.file: record.entry for record in records}
    manifest = Manifest(facts=tiny.build_facts(1), parameters={"w": entry}, groups={}, files=files)
    check_manifest(manifest, origin="test")
    shards.check_shards(folder, manifest)
    return CheckpointFolder(path=folder, manifest=manifest)


def read(checkpoint: CheckpointFolder, start: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.full((count,), -1, dtype=dtype)
    with shards.OpenShards(checkpoint) as opened:
        opened.fill(values, checkpoint.manifest.parameters["w"].weight, start=start, what="w")
    return values


@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, 77), max_size=6), wanted=st.tuples(st.integers(0, 77), st.integers(0, 77)))
def test_any_range_of_any_cut_comes_back(tiny, cuts, wanted):
    """Rows of FSDP2 and partitions of ZeRO-3 are such cuts; their last rank may have nothing."""
    cut = [(begin, end - begin) for begin, end in pairwise([0, *sorted(cuts), 77])]
    start, end = sorted(wanted)
    with TemporaryDirectory() as folder:
        checkpoint = saved(tiny, Path(folder), cut, WEIGHT)
        assert torch.equal(read(checkpoint, start, end - start), WEIGHT.view(-1)[start:end])


def test_a_range_within_a_large_chunk_comes_back_and_no_more_than_there_is(tiny, tmp_path):
    count = 3 * shards.BLOCK_BYTES // 4
    weight = torch.arange(count, dtype=torch.float32)
    checkpoint = saved(tiny, tmp_path, [(0, count)], weight)
    assert torch.equal(read(checkpoint, 12_345, count - 20_000), weight[12_345 : count - 7_655])
    with pytest.raises(InputError, match=f"w: has {count} elements, {count + 3} are wanted"):
        read(checkpoint, count - 7, 10)


@pytest.mark.parametrize("saved_as", [torch.bfloat16, torch.float16, torch.float32])
def test_wider_values_are_exact_and_rounding_is_refused(tiny, tmp_path, saved_as):
    weight = torch.randn(33).to(saved_as)
    checkpoint = saved(tiny, tmp_path, [(0, 33)], weight)
    for read_as in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        if torch.finfo(read_as).bits > torch.finfo(saved_as).bits or read_as is saved_as:
            assert torch.equal(read(checkpoint, 0, 33, read_as), weight.to(read_as))
        else:
            with pytest.raises(InputError, match="it would be rounded"):
                read(checkpoint, 0, 33, read_as)


def test_every_tensor_begins_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    dtypes = (torch.bool, torch.bfloat16, torch.float32, torch.uint8, torch.float64)
    pieces = [Piece(str(dtype), None, 0, torch.ones(3, dtype=dtype)) for dtype in dtypes]
    shards.write_shards(tmp_path, pieces, rank=0, world_size=1, on_point=lambda point: None)
    content = (tmp_path / "shard-00000.safetensors").read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    assert header_bytes % 8 == 0
    for piece in pieces:
        assert header[f"{piece.name}|weight|0"]["data_offsets"][0] % piece.values.element_size() == 0
    loaded = load_file(tmp_path / "shard-00000.safetensors")
    assert all(torch.equal(loaded[f"{piece.name}|weight|0"], piece.values) for piece in pieces)


def test_a_rank_that_holds_much_writes_several_files_side_by_side(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_LEAST_FILE_BYTES", 256)
    monkeypatch.setattr(shards, "own_cores", lambda: 3)
    weight = torch.randn(91, 11)
    checkpoint = saved(tiny, tmp_path, [(0, 500), (500, 501)], weight)
    assert sorted(checkpoint.manifest.files) == [f"shard-{number:05d}.safetensors" for number in range(12)]
    sizes = [entry.size_bytes for entry in checkpoint.manifest.files.values()]
    assert max(sizes) - min(sizes) <= 16
    assert torch.equal(read(checkpoint, 0, 1001), weight.view(-1))
    monkeypatch.setattr(shards, "_MOST_FILE_BYTES", 200)
    assert len(saved(tiny, tmp_path / "more", [(0, 1001)], weight).manifest.files) == 21


def test_a_piece_that_is_fetched_from_elsewhere_is_not_cut(tmp_path, monkeypatch):
    """Two threads would take each other's memory away."""
    monkeypatch.setattr(shards, "_LEAST_FILE_BYTES", 16)

    class Elsewhere:
        def bring(self, num_elements: int, *, to_fill: bool) -> torch.Tensor:
            return torch.ones(num_elements)

        def put_away(self) -> None:
            """Nothing is kept."""

    piece = Piece("w", None, 0, torch.empty(999, device="meta"), elsewhere=Elsewhere())
    assert (
        len(shards.write_shards(tmp_path, [piece, piece._replace(start=999)], rank=0, world_size=1, on_point=print))
        == 1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_is_not_finite_is_found_in_every_type(dtype):
    for value in (0.5, float("nan"), float("inf"), float("-inf")):
        values = torch.linspace(-1, 1, 100, dtype=dtype)
        values[50] = value
        assert shards.is_finite(values) is (value == 0.5)


class Held(NamedTuple):
    start: int
    num_elements: int


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 4, 8])), max_size=8),
    world_size=st.integers(1, 9),
)
def test_shares_of_all_ranks_are_every_element_once_and_of_even_size(sizes, world_size):
    total = sum(count * width for count, width in sizes)
    seen = []
    for rank in range(world_size):
        shares = share_of_rank(sizes, rank=rank, world_size=world_size)
        seen += [(each.position, each.start + index) for each in shares for index in range(each.num_elements)]
        assert sum(share.num_elements * sizes[share.position][1] for share in shares) <= total / world_size + 8
    assert seen == [(position, element) for position, (count, _) in enumerate(sizes) for element in range(count)]


@pytest.mark.parametrize(
    ("chunks", "place"),
    [
        ([], "0 to 9 of 10 are missing"),
        ([(0, 4), (5, 5)], "4 to 4 of 10 are missing"),
        ([(0, 4), (4, 3)], "7 to 9 of 10 are missing"),
        ([(0, 6), (4, 6)], "4 to 5 of 10 are there twice"),
        ([(0, 4), (4, 8)], "10 to 11 of 10 are too many"),
    ],
)
def test_holes_overlaps_and_overshoot_are_refused_with_their_place(chunks, place):
    with pytest.raises(InputError, match=f"^w: elements {place}$"):
        covered_in_order([Held(*chunk) for chunk in chunks], num_elements=10, what="w")
