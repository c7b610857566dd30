"""Piece `prediction`: what was predicted of each configuration, beside what it came to."""

from collections.abc import Iterator, Mapping

import msgspec

from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.pieces import Piece, Row, Step


def cases() -> tuple[Case, ...]:
    return (
        Case(
            name="qwen2.5-0.5b bf16 full adamw_fused 2k",
            model="qwen2.5-0.5b",
            settings={"pin.precision": "bf16", "pin.optimizer": "adamw_fused", "pin.checkpointing": "none"},
        ),
    )


def steps(bench: Bench, _done: Mapping[str, Row]) -> Iterator[Step]:
    for case in cases():
        yield Step(case.name, lambda case=case: msgspec.to_builtins(bench.run(case)))


def tables(_rows: Mapping[str, Row]) -> dict[str, str]:
    return {}


PIECE = Piece(name="prediction", about="predicted beside measured, on many configurations", steps=steps, tables=tables)
