"""wandb's log of records, read without wandb; and what a run directory keeps of its run."""

import struct
import zlib

import pytest

from shardwise.launch.track.offline import WandbRun, offline_folders, read_records, read_wandb_run, write_wandb_run
from shardwise.trainer.spec.errors import InputError

BLOCK = 32 * 1024
RECORDS = [b"first", b"x" * (BLOCK - 30), b"y" * (3 * BLOCK), b"", b"last"]


def log_of(records):
    """As wandb writes it: pieces that cross no block, a rest of fewer than seven bytes left empty."""
    content = b":W&B\xe1\xbe\x00"
    for record in records:
        begin, is_first = 0, True
        while is_first or begin < len(record):
            left = BLOCK - len(content) % BLOCK
            if left < 7:
                content += bytes(left)
                left = BLOCK
            piece = record[begin : begin + left - 7]
            is_last = begin + len(piece) == len(record)
            kind = 1 if is_first and is_last else 2 if is_first else 4 if is_last else 3
            content += struct.pack("<IHB", zlib.crc32(piece, zlib.crc32(bytes([kind]))), len(piece), kind) + piece
            begin, is_first = begin + len(piece), False
    return content


def test_a_log_is_read_up_to_its_first_piece_that_is_damaged_or_incomplete(tmp_path):
    log, whole = tmp_path / "run-a.wandb", log_of(RECORDS)

    def records(content):
        log.write_bytes(content)
        return list(read_records(log))

    assert records(whole) == RECORDS
    for missing, retained in ((1, 4), (12, 3), (100, 2)):
        assert records(whole[:-missing]) == RECORDS[:retained]
    damaged = bytearray(whole)
    damaged[BLOCK + 100] ^= 1
    assert records(damaged) == RECORDS[:2]
    assert records(b"") == records(b":W&B") == records(b"another file") == []


def test_the_wandb_run_of_a_directory_is_stored_and_its_folders_stand_in_the_order_they_were_written(tmp_path):
    for name in ("offline-run-20261123_000000-b", "run-20261122_120000-b", "offline-run-20261122_235959-b"):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    names = [path.name for path in offline_folders(tmp_path)]
    assert names == ["offline-run-20261122_235959-b", "offline-run-20261123_000000-b"]
    assert read_wandb_run(tmp_path) is None
    run = WandbRun(id="abcd1234", project="mine", url="https://example.org/run", sent_lines=7, synced=("a",))
    write_wandb_run(tmp_path, run)
    assert read_wandb_run(tmp_path) == run
    (tmp_path / "wandb.json").write_text("{")
    with pytest.raises(InputError, match=r"wandb\.json"):
        read_wandb_run(tmp_path)
