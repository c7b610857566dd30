"""What goes with what: docs/support-matrix.md, worked out from the rules and from the tests that prove the rest.

    python benchmarks/support_matrix.py            prints the tables
    python benchmarks/support_matrix.py --write    puts them into docs/support-matrix.md
    python benchmarks/support_matrix.py --check    says whether the page is up to date (exit code 1 where it is not)

A cell is a combination of two or three values, everything else as plain as can be. The tables of incompatibilities are
asked about it on a machine that has everything (two nodes of Blackwell): what they forbid there is refused. They are
asked again on a CPU: what they forbid there needs a GPU. The rest works. `PROOFS` names the test of every cell that is
not refused, and a cell without one is an error.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from msgspec.structs import replace  # noqa: E402  (the path comes first)

from trainer.planning.combination import Combination, Incompatibility, Reach, first_broken  # noqa: E402  (path first)
from trainer.planning.device import Device, device_of  # noqa: E402
from trainer.planning.gpu_specs import hardware_from_spec  # noqa: E402
from trainer.planning.incompatible_rows import LAYOUTS, ROWS  # noqa: E402
from trainer.planning.incompatible_settings import RECIPE_CAPABILITY, SETTINGS  # noqa: E402
from trainer.planning.not_yet import NOT_YET, version_that_trains  # noqa: E402
from trainer.planning.rules import RULES  # noqa: E402
from trainer.spec.hardware import Host  # noqa: E402
from trainer.spec.model_shape import ModelShape, read_model_shape  # noqa: E402
from trainer.spec.strategy import (  # noqa: E402
    Checkpointing,
    Fp8Recipe,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Sharding,
    Strategy,
)

DOCUMENT = ROOT / "docs" / "support-matrix.md"
VERSION = (0, 3)  # what this page is of
INCOMPATIBILITIES: tuple[Incompatibility, ...] = (*LAYOUTS, *ROWS, *SETTINGS)
GIB = 2**30
_HOST = Host(cpu_name=None, num_cores=8, ram_bytes=1024 * GIB, ram_available_bytes=1024 * GIB)
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
}


class Cell(NamedTuple):
    """Values of some axes; what is not named is plain."""

    sharding: Sharding = Sharding.NONE
    offload: Offload = Offload.NONE
    method: Method = Method.FULL
    optimizer: Optimizer | None = None  # None: the AdamW of the layout
    precision: Precision = Precision.BF16_MIXED
    checkpointing: Checkpointing = Checkpointing.NONE
    loss: LossHead = LossHead.CHUNKED
    compile: bool = False
    activation_offload: bool = False
    optimizer_in_backward: bool = False
    fp8_recipe: Fp8Recipe | None = None
    gpu: str = "B200"

    @property
    def strategy(self) -> Strategy:
        is_on_host = self.offload is not Offload.NONE and self.sharding.uses_deepspeed
        plain = Optimizer.ADAMW if self.method is Method.GALORE else Optimizer.ADAMW_FUSED
        return Strategy(
            name="",
            sharding=self.sharding,
            offload=self.offload,
            optimizer=self.optimizer or (Optimizer.DEEPSPEED_CPU_ADAM if is_on_host else plain),
            precision=self.precision,
            is_exact=False,
        )

    def on(self, device: Device) -> Combination:
        """The cell on a machine; as many micro batches as go with it."""
        return Combination(
            strategy=self.strategy,
            method=self.method,
            num_ranks=device.num_devices,
            device=device,
            shape=_shape(),
            accumulation=1,
            checkpointing=self.checkpointing,
            loss=self.loss,
            compile=self.compile,
            activation_offload=self.activation_offload,
            optimizer_in_backward=self.optimizer_in_backward,
            fp8_recipe=self.fp8_recipe,
        )


class Proof(NamedTuple):
    """A test, and the cells that it runs."""

    name: str
    test: str  # file::function
    shows: Callable[[Cell], bool]


class Table(NamedTuple):
    """Cells by row and column, with what stands at their heads."""

    name: str
    corner: str
    rows: Sequence[tuple[str, dict[str, Any]]]
    columns: Sequence[tuple[str, dict[str, Any]]]

    def cells(self) -> Iterator[tuple[str, list[Cell]]]:
        for head, row in self.rows:
            yield head, [Cell(**{**row, **column}) for _, column in self.columns]


class Verdict(NamedTuple):
    """What a cell says: works, refused or needs hardware; the rule or the test behind it."""

    words: str
    note: str


def _shape() -> ModelShape:
    return read_model_shape(_LLAMA)


def _machine(spec: str) -> Device:
    return device_of(hardware_from_spec(spec, local_host=_HOST))


def verdict_of(cell: Cell) -> Verdict:
    """What the program does with a cell; AssertionError where nothing proves that it works."""
    is_alone = cell.sharding is Sharding.NONE
    broken = first_broken(INCOMPATIBILITIES, cell.on(_machine(f"{'1x' if is_alone else '2x8x'}{cell.gpu}")))
    if broken is not None:
        return Verdict("refused", broken.name)
    version = _later_version(cell)
    if version is not None:
        return Verdict(f"from {version}", "not_yet")
    plain_cpu = replace(cell.on(_machine("1xCPU" if is_alone else "2xCPU")), cpu_flags=frozenset())
    on_cpu = first_broken(INCOMPATIBILITIES, plain_cpu, reach=Reach.OURS)
    proofs = PROOFS if on_cpu is None else GPU_PROOFS
    proof = next((proof for proof in proofs if proof.shows(cell)), None)
    assert proof is not None, f"no test proves {cell}"
    return Verdict("works" if on_cpu is None else _needed(cell), proof.name)


def _later_version(cell: Cell) -> str | None:
    """A version after the one that this page is of."""
    row = cell.strategy
    members: tuple[tuple[str, object], ...] = (
        ("method", cell.method), ("sharding", row.sharding), ("offload", row.offload), ("optimizer", row.optimizer),
        ("precision", row.precision), ("sharding+precision", (row.sharding, row.precision)),
        ("checkpointing", cell.checkpointing), ("loss", cell.loss), ("compile", cell.compile),
        ("activation_offload", cell.activation_offload), ("optimizer_in_backward", cell.optimizer_in_backward),
    )  # fmt: skip
    found = (version_that_trains(axis, member) for axis, member in members)
    return next((version for version in found if version is not None and is_later(version)), None)


def is_later(version: str) -> bool:
    """Whether a version comes after the one that this page is of."""
    return tuple(int(part) for part in version.split(".")) > VERSION


def _needed(cell: Cell) -> str:
    if cell.precision is Precision.FP16_MIXED and cell.sharding.uses_deepspeed:
        return "needs fp16 units: a GPU, or a CPU with avx512_fp16"
    if cell.precision is Precision.FP8:
        major, minor = RECIPE_CAPABILITY.get(cell.fp8_recipe or Fp8Recipe.CURRENT, (8, 9))
        what = f"GPU of {major}.{minor}"
    else:
        what = "GPU"
    return f"needs 2 {what}" if cell.sharding is Sharding.DDP else f"needs a {what}"


_GPU = "tests/gpu/test_techniques_gpu.py::test_it_is_what_its_plan_says"
COVERING = "tests/distributed/test_covering.py::test_a_point_trains_like_the_plain_run_of_its_update"


def _gpu_case(name: str, shows: Callable[[Cell], bool]) -> Proof:
    return Proof(f"gpu-{name}".replace("+", "-"), f"{_GPU}[{name}]", shows)


def _fp8_under(sharding: Sharding) -> Proof:
    return _gpu_case(
        f"fp8-current-{sharding}", lambda cell: cell.precision is Precision.FP8 and cell.sharding is sharding
    )


def _fused_under(sharding: Sharding) -> Proof:
    return _gpu_case(
        f"loss-fused_linear-{sharding}",
        lambda cell: cell.loss is LossHead.FUSED_LINEAR and cell.sharding is sharding,
    )


def _recipe(recipe: Fp8Recipe) -> Proof:
    return _gpu_case(
        f"fp8-{recipe}",
        lambda cell: cell.precision is Precision.FP8 and (cell.fp8_recipe or Fp8Recipe.CURRENT) is recipe,
    )


def _offloaded(method: Method) -> Proof:
    name = "fsdp+optimizer+params" if method is Method.FULL else f"fsdp+optimizer+params-{method}"
    return _gpu_case(
        name, lambda cell: cell.sharding is Sharding.FSDP and cell.offload is not Offload.NONE and cell.method is method
    )


_ENGINES = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP, Sharding.FSDP_GRAD_OP)
# What runs on a CPU, the more particular first.
PROOFS: tuple[Proof, ...] = (
    Proof(
        "compiled-alone",
        "tests/runtime/test_compilation.py::test_compiled_and_recomputed_blocks_give_the_gradients_of_eager_ones",
        lambda cell: cell.compile and cell.sharding is Sharding.NONE,
    ),
    Proof(
        "compiled",
        "tests/distributed/test_activations.py::test_compiled_blocks_train_alike_under_every_engine",
        lambda cell: cell.compile,
    ),
    Proof(
        "inside-fsdp",
        "tests/distributed/test_optimizers_sharded.py::test_a_sharded_optimizer_steps_as_one_with_whole_tensors",
        lambda cell: cell.optimizer_in_backward and cell.sharding.uses_fsdp,
    ),
    Proof(
        "offload",
        "tests/distributed/test_offload.py::test_ten_steps_equal_those_of_ddp",
        lambda cell: cell.offload is not Offload.NONE and cell.method is Method.FULL,
    ),
    Proof("covering", COVERING, lambda cell: True),
)
# What a CPU cannot run; cases of one GPU, and of two for DistributedDataParallel.
GPU_PROOFS: tuple[Proof, ...] = (
    *(_fp8_under(sharding) for sharding in _ENGINES),
    Proof(
        "wiring",
        "tests/distributed/test_precision.py::test_every_forward_multiplies_in_fp8_recomputation_too",
        lambda cell: cell.precision is Precision.FP8 and cell.sharding is Sharding.DDP,
    ),
    Proof(
        "fp16-engine",
        "tests/distributed/test_precision.py::test_deepspeed_scales_and_its_scale_is_told",
        lambda cell: cell.precision is Precision.FP16_MIXED,
    ),
    *(_recipe(recipe) for recipe in Fp8Recipe),
    *(_fused_under(sharding) for sharding in _ENGINES),
    _gpu_case("loss-fused_linear", lambda cell: cell.loss is LossHead.FUSED_LINEAR),
    *(_offloaded(method) for method in Method),
    _gpu_case("galore-adamw_8bit", lambda cell: cell.method is Method.GALORE),
)

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
    ("`optimizer_in_backward`", {"optimizer_in_backward": True}),
]
_CARDS = (("8.9 (Ada)", "L40S"), ("9.0 (Hopper)", "H200"), ("10.0 (Blackwell)", "B200"))
TABLES: tuple[Table, ...] = (
    Table("layouts", "where state lives", _LAYOUTS, _METHODS),
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
    """The parts of the page by the name of their place."""
    parts = {table.name: _written(table) for table in TABLES}
    parts["rules"] = _rules()
    parts["later"] = _later()
    parts["footnotes"] = _footnotes()
    return parts


def cited() -> dict[str, set[Cell]]:
    """The cells of every test that the page names."""
    tests = {proof.name: proof.test for proof in (*PROOFS, *GPU_PROOFS)}
    found: dict[str, set[Cell]] = {}
    for table in TABLES:
        for _, cells in table.cells():
            for cell in cells:
                note = verdict_of(cell).note
                if note in tests:
                    found.setdefault(tests[note], set()).add(cell)
    return found


def replaced(document: str) -> str:
    """`document` with every part in its place."""
    for name, part in tables().items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        document, count = place.subn(lambda found, part=part: f"{found[1]}{part}{found[2]}", document)
        assert count == 1, f"docs/support-matrix.md has no place for {name}"
    return document


def _written(table: Table) -> str:
    lines = [[table.corner, *(head for head, _ in table.columns)], ["---"] * (1 + len(table.columns))]
    for head, cells in table.cells():
        verdicts = [verdict_of(cell) for cell in cells]
        lines.append([head, *(f"{verdict.words}[^{verdict.note}]" for verdict in verdicts)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _rules() -> str:
    """What depends on the job or on the number of ranks, which no cell above has."""
    shown = _notes()
    rows = [["rule", "says", "use instead", "evidence", "gives way to"], ["---"] * 5]
    for rule in RULES:
        if rule.name not in shown or rule.name == "not_yet":
            pin = f"`pin.{rule.yields_to}`" if rule.yields_to else ""
            rows.append([f"`{rule.name}`", _plain(rule.reason), _plain(rule.instead or ""), rule.evidence, pin])
    rows += [
        [f"`{rule.name}`", _plain(rule.reason), _plain(rule.instead or ""), rule.evidence, ""]
        for rule in INCOMPATIBILITIES
        if rule.name not in shown and rule.name not in {known.name for known in RULES}
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _later() -> str:
    rows = [["what", "with shardwise"], ["---", "---"]]
    for late in NOT_YET:
        if is_later(late.version):
            members = ", ".join(
                f"`{' with '.join(member)}`" if isinstance(member, tuple) else f"`{member}`" for member in late.members
            )
            what = "checkpoints and `--resume` under" if late.axis == "saved_sharding" else late.axis
            rows.append([f"{what} {members}", late.version])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _notes() -> set[str]:
    return {verdict_of(cell).note for table in TABLES for _, cells in table.cells() for cell in cells}


def _footnotes() -> str:
    notes, lines = _notes(), list[str]()
    lines += [f"[^{proof.name}]: `{proof.test}`\n" for proof in (*PROOFS, *GPU_PROOFS) if proof.name in notes]
    for rule in INCOMPATIBILITIES:
        if rule.name in notes:
            instead = f" Instead: {_plain(rule.instead)}." if rule.instead else ""
            lines.append(f"[^{rule.name}]: `{rule.name}`: {_plain(rule.reason)}.{instead} Evidence: {rule.evidence}.\n")
    if "not_yet" in notes:
        lines.append("[^not_yet]: comes with that version; see the table above.\n")
    return "".join(lines)


def _plain(template: str) -> str:
    """A template with the names of its holes in italics."""
    return re.sub(r"\{(\w+)\}", lambda hole: f"*{hole[1].replace('_', ' ')}*", template)


def main() -> int:
    """Prints, writes or checks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not options.write and not options.check:
        sys.stdout.write("\n".join(tables().values()))
        return 0
    document = DOCUMENT.read_text(encoding="utf-8")
    current = replaced(document)
    if options.write:
        DOCUMENT.write_text(current, encoding="utf-8")
    elif current != document:
        sys.stderr.write(
            "docs/support-matrix.md is not what the rules say: python benchmarks/support_matrix.py --write\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
