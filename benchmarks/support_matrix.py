"""The tables of docs/support-matrix.md, derived from the rules and from the tests that cover everything else.

    python benchmarks/support_matrix.py            prints the tables
    python benchmarks/support_matrix.py --write    writes them into docs/support-matrix.md
    python benchmarks/support_matrix.py --check    checks that the page is up to date (exit code 1 if it is not)

A cell is a combination of two or three values with defaults for everything else. A cell that the tables of
incompatibilities forbid on a machine with all features (two nodes of Blackwell) is refused; one that they forbid only
on a CPU needs a GPU; the others work. `PROOFS` names the test of every cell that is not refused; a cell without one
is an error.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "benchmarks", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from msgspec.structs import replace  # noqa: E402  (the path comes first)
from support_cells import Cell, device_named  # noqa: E402
from support_proofs import GPU_PROOFS, PROOFS  # noqa: E402
from written_page import markdown_table, run_page  # noqa: E402

from shardwise.trainer.planning.rules.incompatible import LAYOUTS, ROWS, SETTINGS  # noqa: E402  # noqa: E402
from shardwise.trainer.planning.rules.rule import RULES  # noqa: E402
from shardwise.trainer.planning.rules.rule_input import Incompatibility, Reach, first_broken, reaching  # noqa: E402
from shardwise.trainer.spec.engines import Offload, Sharding  # noqa: E402
from shardwise.trainer.spec.fp8 import FP8_RECIPES  # noqa: E402
from shardwise.trainer.spec.optimizers import Optimizer  # noqa: E402
from shardwise.trainer.spec.packages import extra_text  # noqa: E402
from shardwise.trainer.spec.strategy import Checkpointing, Fp8Recipe, LossHead, Method, Precision  # noqa: E402

DOCUMENT = ROOT / "docs" / "support-matrix.md"
INCOMPATIBILITIES: tuple[Incompatibility, ...] = (*LAYOUTS, *ROWS, *SETTINGS)


class Table(NamedTuple):
    """Cells by row and column, with their headings."""

    name: str
    corner: str
    rows: Sequence[tuple[str, dict[str, Any]]]
    columns: Sequence[tuple[str, dict[str, Any]]]

    def cells(self) -> Iterator[tuple[str, list[Cell]]]:
        for head, row in self.rows:
            yield head, [Cell(**{**row, **column}) for _, column in self.columns]


class Verdict(NamedTuple):
    """Status of a cell (works, refused or needs hardware) and the rule or the test behind it."""

    status: str
    note: str


def verdict_of(cell: Cell) -> Verdict:
    """Verdict for a cell; AssertionError if it is not refused and no test covers it."""
    is_alone = cell.sharding is Sharding.NONE
    broken = first_broken(INCOMPATIBILITIES, cell.on(device_named(f"{'1x' if is_alone else '2x8x'}{cell.gpu}")))
    if broken is not None:
        return Verdict("refused", broken.name)
    cpu = {Sharding.NONE: "1xCPU", Sharding.HSDP: "2x2xCPU"}.get(cell.sharding, "2xCPU")
    plain_cpu = replace(cell.on(device_named(cpu)), cpu_flags=frozenset())
    on_cpu = first_broken(reaching(INCOMPATIBILITIES, Reach.OURS), plain_cpu)
    proofs = PROOFS if on_cpu is None else GPU_PROOFS
    proof = next((proof for proof in proofs if proof.shows(cell)), None)
    assert proof is not None, f"no test proves {cell}"
    return Verdict("works" if on_cpu is None else _needed(cell), proof.name)


def _needed(cell: Cell) -> str:
    if cell.precision is Precision.FP16_MIXED and cell.sharding.uses_deepspeed:
        return "needs fp16 units: a GPU, or a CPU with avx512_fp16"
    if cell.precision is Precision.FP8:
        major, minor = FP8_RECIPES[cell.fp8_recipe or Fp8Recipe.TORCHAO_TENSORWISE].capability
        what = f"GPU of {major}.{minor}"
    else:
        what = "GPU"
    least = {Sharding.DDP: "2", Sharding.HSDP: "4"}  # the other engines need one
    return f"needs {least.get(cell.sharding, 'a')} {what}"


_SHARDINGS = [(f"`{sharding}`", {"sharding": sharding}) for sharding in Sharding]
_METHODS = [(f"`{method}`", {"method": method}) for method in Method]
_ON_HOST = {"optimizer": Optimizer.DEEPSPEED_CPU_ADAM, "offload": Offload.OPTIMIZER}
_OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    (f"`{optimizer}`", {"optimizer": optimizer})
    for optimizer in Optimizer
    if optimizer is not Optimizer.DEEPSPEED_CPU_ADAM
]
_OPTIMIZERS_OF_METHODS = [
    *_OPTIMIZERS,
    ("`deepspeed_cpu_adam` in `zero2` + `optimizer`", _ON_HOST | {"sharding": Sharding.ZERO2}),
]
_OPTIMIZERS.append(("`deepspeed_cpu_adam`, offload `optimizer`", _ON_HOST))
_LAYOUTS = [
    (
        f"`{sharding}`" if offload is Offload.NONE else f"`{sharding}` + `{offload}`",
        {"sharding": sharding, "offload": offload},
    )
    for offload in Offload
    for sharding in Sharding
]
_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((f"checkpointing `{member}`", {"checkpointing": member}) for member in Checkpointing),
    *((f"loss `{member}`", {"loss": member}) for member in LossHead),
    ("`compile`", {"compile": True}),
    ("`activation_offload`", {"activation_offload": True}),
    ("`embedding_on_host` with `lora`", {"embedding_on_host": True, "method": Method.LORA}),
    ("`optimizer_in_backward`", {"optimizer_in_backward": True}),
]
_CARDS = (("8.9 (Ada)", "L40S"), ("9.0 (Hopper)", "H200"), ("10.0 (Blackwell)", "B200"))
TABLES: tuple[Table, ...] = (
    Table("layouts", "sharding, offload", _LAYOUTS, _METHODS),
    Table("optimizers", "optimizer", _OPTIMIZERS, _SHARDINGS),
    Table("methods", "optimizer", _OPTIMIZERS_OF_METHODS, _METHODS),
    Table("precisions", "precision", [(f"`{p}`", {"precision": p}) for p in Precision], _SHARDINGS),
    Table("settings", "setting", _SETTINGS, _SHARDINGS),
    Table(
        "recipes",
        "FP8 recipe",
        [(f"`{r}`", {"fp8_recipe": r, "precision": Precision.FP8}) for r in Fp8Recipe],
        [(head, {"gpu": card}) for head, card in _CARDS],
    ),
)


def tables() -> dict[str, str]:
    """The generated parts of the page by the name of their markers."""
    parts = {table.name: _written(table) for table in TABLES}
    parts["rules"] = _rules()
    parts["footnotes"] = _footnotes()
    return parts


def cited() -> dict[str, set[Cell]]:
    """The cells that the page attributes to each proof."""
    proofs = {proof.name for proof in (*PROOFS, *GPU_PROOFS)}
    found: dict[str, set[Cell]] = {}
    for table in TABLES:
        for _, cells in table.cells():
            for cell in cells:
                note = verdict_of(cell).note
                if note in proofs:
                    found.setdefault(note, set()).add(cell)
    return found


def _written(table: Table) -> str:
    """The table with equal rows as one and equal columns as one."""
    rows = _merged(
        (head, tuple(f"{verdict.status}[^{verdict.note}]" for verdict in map(verdict_of, cells)))
        for head, cells in table.cells()
    )
    heads = (head for head, _ in table.columns)
    columns = _merged(zip(heads, zip(*rows.values(), strict=True), strict=True))
    return markdown_table(
        (table.corner, *columns.keys()),
        [(head, *(column[row] for column in columns.values())) for row, head in enumerate(rows)],
    )


def _merged(lines: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
    """Cells by head; lines with the same cells share theirs."""
    heads: dict[tuple[str, ...], list[str]] = {}
    for head, cells in lines:
        heads.setdefault(cells, []).append(head)
    return {_listed(shared): cells for cells, shared in heads.items()}


def _listed(heads: Iterable[str]) -> str:
    """Heads in a line; those of one offload name it once."""
    by_offload: dict[str, list[str]] = {}
    for head in heads:
        sharding, plus, offload = head.partition(" + ")
        by_offload.setdefault(f"{plus}{offload}", []).append(sharding)
    return "; ".join(f"{', '.join(shardings)}{offload}" for offload, shardings in by_offload.items())


def _rules() -> str:
    """Rules that no cell names: they depend on the job, the hardware or the number of ranks."""
    shown = _notes()
    rows = []
    for rule in RULES:
        if rule.name not in shown:
            pin = f"`pin.{rule.yields_to}`" if rule.yields_to else ""
            rows.append((f"`{rule.name}`", _plain(rule.reason), _plain(rule.instead or ""), pin))
    rows += [
        (f"`{rule.name}`", _plain(rule.reason), _plain(rule.instead or ""), "")
        for rule in INCOMPATIBILITIES
        if rule.name not in shown and rule.name not in {known.name for known in RULES}
    ]
    return markdown_table(("rule", "reason", "use instead", "overridden by"), rows)


def _notes() -> set[str]:
    return {verdict_of(cell).note for table in TABLES for _, cells in table.cells() for cell in cells}


def _footnotes() -> str:
    notes, lines = _notes(), list[str]()
    lines += [f"[^{proof.name}]: `{proof.test}`\n" for proof in (*PROOFS, *GPU_PROOFS) if proof.name in notes]
    for rule in INCOMPATIBILITIES:
        if rule.name in notes:
            instead = f" Instead: {_plain(rule.instead)}." if rule.instead else ""
            lines.append(f"[^{rule.name}]: `{rule.name}`: {_plain(rule.reason)}.{instead}\n")
    return "".join(lines)


def _plain(template: str) -> str:
    """A template with the names of its fields in italics, and `pip install ...` for install lines."""
    template = re.sub(
        r"\{install\[([\w-]+)\]\}", lambda name: f"`{shlex.join(('pip', 'install', *extra_text(name[1])))}`", template
    )
    return re.sub(r"\{(\w+)\}", lambda name: f"*{name[1].replace('_', ' ')}*", template)


if __name__ == "__main__":
    sys.exit(run_page(DOCUMENT, tables, command=__file__, summary=(__doc__ or "").splitlines()[0]))
