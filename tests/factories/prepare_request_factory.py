"""Requests to prepare data, functions of a user's own, and rows that need no preparation."""

import os
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np

from shardwise.launch.inputs.data_files import list_files
from shardwise.launch.inputs.prepare_data import RACY_CHANGE_NS
from shardwise.trainer.runtime.data.cache import TokenLayout, TokenRows
from shardwise.trainer.spec.data.profile import PrepareRequest, SourceFile
from shardwise.trainer.spec.job.sections import BadRows, DataFormat
from shardwise.trainer.spec.job.sources import DataSource
from shardwise.trainer.spec.messages.extension import Extension, Hook

REQUEST = PrepareRequest(
    sources=(), eval_share=None, eval_source=None, format=DataFormat.AUTO, fields={}, packing=None,
    bad_rows=BadRows.FAIL, bad_rows_max=0.001, seq_len=16, vocab_size=300, tokenizer=None, cache_root="",
)  # fmt: skip


def request_for(*sources: Path | str | tuple[Path, float], cache_root: Path, **settings: object) -> PrepareRequest:
    pairs = [source if isinstance(source, tuple) else (source, 1.0) for source in sources]
    named = tuple(DataSource(source=str(path), weight=weight) for path, weight in pairs)
    return msgspec.structs.replace(REQUEST, sources=named, cache_root=str(cache_root), **settings)


def listed_request(*sources: Path | str | tuple[Path, float], cache_root: Path, **settings: object) -> PrepareRequest:
    return list_files(request_for(*sources, cache_root=cache_root, **settings))


def extension_of(folder: Path, text: str, *hooks: Hook) -> Extension:
    path = folder / "mine.py"
    path.write_text(text)
    return Extension(path=str(path), sha256=sha256(text.encode()).hexdigest(), hooks=hooks)


def written_source(path: Path, content: bytes | str) -> SourceFile:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status = path.stat()
    return SourceFile(path=str(path), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def numbered_text(num_lines: int, *, word: str = "row") -> str:
    return "".join(f"{word} {number} of {num_lines}, which is {number * 7919 % 1000}\n" for number in range(num_lines))


def make_old(*paths: Path) -> None:
    """Dates files back by an hour, so that they count as settled, and waits until the kernel's clock has moved on."""
    for path in paths:
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 3600 * 10**9))
    time.sleep(2 * RACY_CHANGE_NS / 1e9)


def rows_of_lengths(folder: Path, lengths: Sequence[int], *, seq_len: int | None = None) -> TokenRows:
    """Rows of these lengths; row i starts with token i + 1 and goes on with tokens above 1000."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    tokens = (1000 + np.arange(sum(lengths)) % 1000).astype("<u2")
    tokens[starts] = np.arange(len(lengths)) + 1
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    np.save(folder / "train_rows.npy", np.stack([starts, np.asarray(lengths, np.int64)], axis=1))
    layout = TokenLayout(dtype="uint16", num_tokens=len(tokens), seq_len=seq_len or max(lengths), pad_id=0)
    (folder / "layout.json").write_bytes(msgspec.json.encode(layout))
    return TokenRows.open(folder, "train")
