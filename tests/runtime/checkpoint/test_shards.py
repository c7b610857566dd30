"""Files of ranges: any cut of a tensor over any number of ranks reads back by any other cut."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardwise.trainer.runtime.checkpoint import CheckpointFacts, CheckpointFolder, Manifest, shards
from shardwise.trainer.runtime.checkpoint.layout.pieces import Piece, type_of
from shardwise.trainer.runtime.checkpoint.manifest import ParameterEntry, TensorEntry, check_manifest
from shardwise.trainer.runtime.checkpoint.shards import (
    BLOCK_BYTES,
    OpenShards,
    ShardRecord,
    check_shards,
    is_finite,
    write_shards,
)
from shardwise.trainer.spec.errors import InputError

WEIGHT = torch.arange(7 * 11, dtype=torch.float32).reshape(7, 11)
Cut = list[tuple[int, int]]  # start and number of elements of each rank's range


def fsdp_rows(num_ranks: int) -> Cut:
    """FSDP2's Shard(0): rows in equal groups, the last short or empty."""
    rows = -(-7 // num_ranks)
    bounds = [min(rank * rows, 7) * 11 for rank in range(num_ranks + 1)]
    return [(begin, end - begin) for begin, end in pairwise(bounds)]


def zero3_partitions(num_ranks: int) -> Cut:
    """ZeRO-3's partitions: equal numbers of elements, without the padding at the end."""
    size = -(-77 // num_ranks)
    return [(rank * size, max(min(size, 77 - rank * size), 0)) for rank in range(num_ranks)]


def saved(
    folder: Path, cut: Cut, weight: torch.Tensor, build_facts: Callable[[int], CheckpointFacts]
) -> CheckpointFolder:
    """One parameter `w`, each range written by a rank of its own, the ranks in reverse."""
    folder.mkdir(exist_ok=True)
    records: list[ShardRecord] = []
    for rank, (start, count) in reversed(list(enumerate(cut))):
        piece = Piece("w", None, start, weight.view(-1)[start : start + count])
        own = [piece] if count else []
        records += write_shards(folder, own, rank=rank, world_size=len(cut), on_point=lambda point: None)
    chunks = tuple(placed.chunk for record in records for placed in record.placed)
    entry = ParameterEntry(weight=TensorEntry(shape=tuple(weight.shape), type=type_of(weight), chunks=chunks))
    files = {record.file: record.entry for record in records}
    manifest = Manifest(facts=build_facts(1), parameters={"w": entry}, groups={}, files=files)
    check_manifest(manifest, origin="test")
    check_shards(folder, manifest)
    return CheckpointFolder(path=folder, manifest=manifest)


def read(checkpoint: CheckpointFolder, start: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.full((count,), -1, dtype=dtype)
    entry = checkpoint.manifest.parameters["w"].weight
    assert entry is not None
    with OpenShards(checkpoint) as opened:
        opened.fill(values, entry, start=start, what="w")
    return values


@pytest.mark.parametrize("reader", [fsdp_rows, zero3_partitions])
@pytest.mark.parametrize("writer", [fsdp_rows, zero3_partitions])
@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 2), (2, 3), (3, 2), (4, 1), (5, 8)])
def test_rows_and_partitions_read_each_other(
    tiny: ModuleType,
    tmp_path: Path,
    writer: Callable[[int], Cut],
    reader: Callable[[int], Cut],
    num_writers: int,
    num_readers: int,
) -> None:
    checkpoint = saved(tmp_path, writer(num_writers), WEIGHT, tiny.build_facts)
    read_back = [read(checkpoint, start, count) for start, count in reader(num_readers)]
    assert torch.equal(torch.cat(read_back), WEIGHT.view(-1))


@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, 76), max_size=6), wanted=st.tuples(st.integers(0, 77), st.integers(0, 77)))
def test_any_range_of_any_cut_comes_back(tiny: ModuleType, cuts: set[int], wanted: tuple[int, int]) -> None:
    bounds = [0, *sorted(cuts), 77]
    cut = [(begin, end - begin) for begin, end in pairwise(bounds)]
    start, end = sorted(wanted)
    with TemporaryDirectory() as folder:
        checkpoint = saved(Path(folder), cut, WEIGHT, tiny.build_facts)
        assert torch.equal(read(checkpoint, start, end - start), WEIGHT.view(-1)[start:end])


def test_a_range_within_a_large_chunk_comes_back(tiny: ModuleType, tmp_path: Path) -> None:
    count = 3 * BLOCK_BYTES // 4
    weight = torch.arange(count, dtype=torch.float32)
    checkpoint = saved(tmp_path, [(0, count)], weight, tiny.build_facts)
    assert torch.equal(read(checkpoint, 12_345, count - 20_000), weight[12_345 : count - 7_655])


@pytest.mark.parametrize(
    ("saved_as", "read_as"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)],
)
def test_wider_values_are_exact(tiny: ModuleType, tmp_path: Path, saved_as: torch.dtype, read_as: torch.dtype) -> None:
    weight = torch.randn(33).to(saved_as)
    checkpoint = saved(tmp_path, [(0, 33)], weight, tiny.build_facts)
    assert torch.equal(read(checkpoint, 0, 33, read_as), weight.to(read_as))


@pytest.mark.parametrize(
    ("saved_as", "read_as"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float32),
    ],
)
def test_rounding_is_refused(tiny: ModuleType, tmp_path: Path, saved_as: torch.dtype, read_as: torch.dtype) -> None:
    checkpoint = saved(tmp_path, [(0, 3)], torch.ones(3, dtype=saved_as), tiny.build_facts)
    with pytest.raises(InputError, match="it would be rounded"):
        read(checkpoint, 0, 3, read_as)


def test_more_than_there_is_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, [(0, 77)], WEIGHT, tiny.build_facts)
    with pytest.raises(InputError, match="w: has 77 elements, 80 are wanted"):
        read(checkpoint, 70, 10)


def test_every_tensor_begins_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    dtypes = (torch.bool, torch.bfloat16, torch.float32, torch.uint8, torch.float64)
    pieces = [Piece(str(dtype), None, 0, torch.ones(3, dtype=dtype)) for dtype in dtypes]
    write_shards(tmp_path, pieces, rank=0, world_size=1, on_point=lambda point: None)
    content = (tmp_path / "shard-00000.safetensors").read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    assert header_bytes % 8 == 0
    for piece in pieces:
        assert header[f"{piece.name}|weight|0"]["data_offsets"][0] % piece.values.element_size() == 0
    loaded = load_file(tmp_path / "shard-00000.safetensors")
    assert all(torch.equal(loaded[f"{piece.name}|weight|0"], piece.values) for piece in pieces)


def test_a_rank_that_holds_much_writes_several_files_side_by_side(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_LEAST_FILE_BYTES", 256)
    monkeypatch.setattr(shards, "own_cores", lambda: 3)
    weight = torch.randn(91, 11)
    checkpoint = saved(tmp_path, [(0, 500), (500, 501)], weight, tiny.build_facts)
    assert sorted(checkpoint.manifest.files) == [f"shard-{number:05d}.safetensors" for number in range(12)]
    sizes = [entry.size_bytes for entry in checkpoint.manifest.files.values()]
    assert max(sizes) - min(sizes) <= 16
    assert torch.equal(read(checkpoint, 0, 1001), weight.view(-1))
    monkeypatch.setattr(shards, "_MOST_FILE_BYTES", 200)
    assert len(saved(tmp_path / "more", [(0, 1001)], weight, tiny.build_facts).manifest.files) == 21


def test_a_piece_that_is_fetched_from_elsewhere_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads would take each other's memory away."""
    monkeypatch.setattr(shards, "_LEAST_FILE_BYTES", 16)

    class Elsewhere:
        def bring(self, num_elements: int, *, to_fill: bool) -> torch.Tensor:
            return torch.ones(num_elements)

        def put_away(self) -> None:
            """Nothing is kept."""

    piece = Piece("w", None, 0, torch.empty(999, device="meta"), elsewhere=Elsewhere())
    assert len(write_shards(tmp_path, [piece, piece._replace(start=999)], rank=0, world_size=1, on_point=print)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_seen_in_every_type(dtype: torch.dtype, spoilt: float) -> None:
    values = torch.linspace(-1, 1, 100, dtype=dtype)
    assert is_finite(values)
    values[50] = spoilt
    assert not is_finite(values)
