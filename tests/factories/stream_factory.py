"""Streams of numbered rows: their files, their first window, and plans of ranks that read them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from engine_plan_factory import TINY_LLAMA
from prepare_request_factory import listed_request
from rank_factory import rank_plan

from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.data.sources.rows import RowReading
from shardwise.trainer.runtime.data.stream.rows import Place
from shardwise.trainer.runtime.data.stream.windows import FileFetcher, StreamReader
from shardwise.trainer.runtime.run.state import RunPaths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import LISTING_NAME, DataProfile, PrepareRequest
from shardwise.trainer.spec.job.sections import DataFormat
from shardwise.trainer.spec.plan import Plan

WINDOW_BYTES = 2000


def write_rows(path: Path, names: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": f"{name} is a row of text"}) + "\n" for name in names))
    return path


def write_files(folder: Path, *, num_files: int = 3, rows_of_file: int = 60) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_rows(folder / f"part-{file}.jsonl", [f"{file}.{row}" for row in range(rows_of_file)])
        for file in range(num_files)
    ]


def reader_of(request: PrepareRequest, scratch: Path, begin: Sequence[Place] = ()) -> StreamReader:
    assert request.window_bytes is not None
    reading = RowReading(DataFormat.TEXT, {}, request.vocab_size)
    return StreamReader(request.files, request.window_bytes, begin, reading, FileFetcher(scratch))


def prepared_stream(*sources: Path, cache_root: Path, **settings: Any) -> DataProfile:
    chosen = {"window_bytes": WINDOW_BYTES, "seq_len": 48, "eval_share": 0.1, **settings}
    request = listed_request(*sources, cache_root=cache_root, **chosen)
    profile = prepare(request, lambda _: None)
    assert profile.cache_dir is not None
    codec.write(Path(profile.cache_dir, LISTING_NAME), request)
    return profile


def stream_plan(profile: DataProfile, **settings: Any) -> Plan:
    assert profile.cache_dir is not None
    model_config = {**TINY_LLAMA, "vocab_size": profile.vocab_size}
    plan = rank_plan(Path(profile.cache_dir), **{"sequences_per_step": 4, "model_config": model_config, **settings})
    return msgspec.structs.replace(plan, data=profile)


def paths_of(run_dir: Path, *, attempt: int = 1) -> RunPaths:
    attempt_dir = run_dir / "attempts" / str(attempt)
    attempt_dir.mkdir(parents=True)
    return RunPaths(
        plan_dir=attempt_dir, attempt_dir=attempt_dir, run_dir=run_dir, resume_dir=run_dir, attempt=attempt,
        is_again=False,
    )  # fmt: skip
