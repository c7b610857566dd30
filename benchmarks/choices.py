"""The tables of docs/strategies.md: the planner's choices for its jobs.

    python benchmarks/choices.py            prints the tables
    python benchmarks/choices.py --write    writes them into docs/strategies.md
    python benchmarks/choices.py --check    checks that docs/strategies.md is up to date (exit code 1 if it is not)

Every row is a job file under examples/ on a machine from the catalogue. No figure depends on the machine this runs on.
"""

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "benchmarks", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from written_page import markdown_table, run_page  # noqa: E402  (the path comes first)

from shardwise.launch.plan.gather import plan_inputs, profile_data, read_inputs  # noqa: E402
from shardwise.trainer.planning.candidates import run_hours  # noqa: E402
from shardwise.trainer.planning.explain.first_screen import Line, first_screen, text_of  # noqa: E402
from shardwise.trainer.planning.explain.plan_page import explain_plan  # noqa: E402
from shardwise.trainer.planning.planner import context_of  # noqa: E402
from shardwise.trainer.spec.errors import InputError, NothingFitsError  # noqa: E402
from shardwise.trainer.spec.plan import Plan  # noqa: E402
from shardwise.trainer.spec.units import format_bytes, format_seconds  # noqa: E402

DOCUMENT = ROOT / "docs" / "strategies.md"
NO_SETTINGS = {"HOME": "/nonexistent"}  # no personal settings, no earlier runs


class Case(NamedTuple):
    """A job on a machine."""

    name: str
    example: str
    hardware: str
    overrides: tuple[str, ...] = ()

    def plan(self, *overrides: str) -> Plan:
        """The plan; NothingFitsError or InputError if there is none."""
        inputs = read_inputs(
            ROOT / "examples" / self.example,
            (*self.overrides, *overrides),
            hardware_spec=self.hardware,
            environment=NO_SETTINGS,
        )
        return plan_inputs(inputs, profile_data(inputs), environment=NO_SETTINGS)

    @property
    def command(self) -> str:
        """The command line that prints the plan."""
        return shlex.join(
            ["shardwise", "plan", f"examples/{self.example}", *self.overrides, "--hardware", self.hardware]
        )

    def first_screen(self) -> tuple[Line, ...]:
        """The first screen of the plan."""
        start = shlex.join(["shardwise", "train", f"examples/{self.example}", *self.overrides])
        return first_screen(self.plan(), start=[f"(on that machine) {start}"], more=f"{self.command} -v")


GOLDEN = (
    Case("8B SFT, one 8 GB card, 32 GB RAM", "8b-sft.yaml", "1xRTX-4060-8GB", ("limits.host_ram=32GiB",)),
    Case("8B SFT, two 24 GB cards, 64 GB RAM", "8b-sft.yaml", "2xRTX-3090", ("limits.host_ram=60GiB",)),
    Case("8B SFT, four A100 80 GB", "8b-sft.yaml", "4xA100-SXM4-80GB", ("limits.host_ram=512GiB",)),
    Case("8B SFT, eight H100", "8b-sft.yaml", "8xH100-SXM5-80GB", ("limits.host_ram=1TiB",)),
    Case("8B SFT, four nodes of eight H100", "8b-sft.yaml", "4x8xH100-SXM5-80GB", ("limits.host_ram=1TiB",)),
    Case("70B QLoRA, two 24 GB cards, 64 GB RAM", "2x24gb-70b-qlora.yaml", "2xRTX-3090", ("limits.host_ram=60GiB",)),
)
COMBINATIONS = (
    Case("8 GB: 1B, LoRA rank 8", "8gb-1b-lora.yaml", "1xRTX-4060-8GB"),
    Case("16 GB: 3B, LoRA rank 16", "16gb-3b-lora.yaml", "1xRTX-4080"),
    Case("24 GB: 7B, LoRA rank 16", "24gb-7b-lora.yaml", "1xRTX-4090"),
    Case("40 GB: 13B, LoRA rank 32", "40gb-13b-lora.yaml", "1xA100-SXM4-40GB"),
    Case("80 GB: 7B, all parameters", "80gb-7b-full.yaml", "1xA100-SXM4-80GB"),
    Case("8 x 80 GB: 70B, ZeRO-3 or FSDP", "8x80gb-70b-full.yaml", "8xH100-SXM5-80GB"),
)
WITHIN_8_GB = (
    Case("7B within 8 GB: state on NVMe", "8gb-7b-full.yaml", "1xRTX-4060-8GB"),
    Case("... with 256 GB RAM instead", "8gb-7b-full.yaml", "1xRTX-4060-8GB", ("limits.host_ram=256GiB",)),
)

PRINTED = GOLDEN[1]


class Published(NamedTuple):
    """A speed that others measured and published, with the job that comes nearest to it."""

    name: str
    source: str
    model: str
    hardware: str
    job: tuple[str, int, int, str]
    pins: tuple[str, int, str, str]
    tokens_per_s: float  # of one GPU

    def plan(self, *, is_pinned: bool) -> Plan:
        """The plan of the job, with the pins of the published configuration or without."""
        method, seq_len, sequences, more = self.job
        job = f"train.method={method} train.seq_len={seq_len} train.tokens_per_step={seq_len * sequences}"
        sharding, micro_batch, checkpointing, further = self.pins
        pins = f"pin.sharding={sharding} pin.micro_batch={micro_batch} pin.checkpointing={checkpointing}"
        pinned = f"{pins} pin.compile=true {further}" if is_pinned else ""
        settings = f"model.name={self.model} limits.hours=10000 limits.host_ram=1TiB {job} {more} {pinned}"
        return Case(self.name, "8b-sft.yaml", self.hardware, tuple(settings.split())).plan()

    def cells(self) -> tuple[str, ...]:
        found = [self._cell(self.plan(is_pinned=is_pinned)) for is_pinned in (True, False)]
        return f"{self.name} ({self.source})", f"{self.tokens_per_s:,.0f}", *found

    def _cell(self, plan: Plan) -> str:
        chosen = plan.chosen
        speed = chosen.speed.tokens_per_s_per_gpu
        settings = [
            f"`{chosen.strategy.name}`",
            f"{chosen.micro_batch} x {chosen.accumulation}",
            f"recompute {chosen.checkpointing}",
            *(["activations in host RAM"] if chosen.activation_offload else []),
            *(["embeddings in host RAM"] if chosen.embedding_on_host else []),
            *(["update in the backward"] if chosen.optimizer_in_backward else []),
            format_bytes(chosen.memory.peak_allocated_bytes),
        ]
        return f"{speed:,.0f} ({speed / self.tokens_per_s:.2f}): {', '.join(settings)}"


_TUNE, _MODEL, _FORGE = "torchtune, README", "NeMo AutoModel, performance summary", "KempnerForge, MFU scaling"
_LLAMA_8B, _LLAMA_70B, _QWEN_7B, _QWEN_32B = "llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b", "qwen2.5-32b"
_RANK_8 = "train.lora.rank=8 train.lora.targets=[q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
_BF16, _SMALL = "allow=[offload_cpu,bf16_weights]", "allow=[offload_cpu,bf16_weights,optimizer_8bit,unclipped]"
_IN_BACKWARD = "pin.precision=bf16 pin.optimizer=paged_adamw_8bit pin.optimizer_in_backward=true"
# name, source, model, machine; method, sequence length, sequences a step, further settings of the job; sharding, micro
# batch, recomputation, further pins (all of these runs compile, or fuse by other means); tokens/s of one GPU
_RUNS: tuple[tuple[str, str, str, str, tuple[str, int, int, str], tuple[str, int, str, str], float], ...] = (
    ("8B full, one RTX 4090", _TUNE, _LLAMA_8B, "1xRTX-4090",
     ("full", 2048, 2, f"limits.host_ram=64GiB {_SMALL}"), ("none", 2, "full", _IN_BACKWARD), 1650),
    ("8B LoRA, one RTX 4090", _TUNE, _LLAMA_8B, "1xRTX-4090",
     ("lora", 2048, 2, f"limits.host_ram=64GiB {_RANK_8}"), ("none", 2, "full", ""), 3083),
    ("8B QLoRA, one RTX 4090", _TUNE, _LLAMA_8B, "1xRTX-4090",
     ("qlora", 2048, 2, f"limits.host_ram=64GiB {_RANK_8}"), ("none", 2, "full", ""), 2413),
    ("8B full, one H200", _FORGE, _LLAMA_8B, "1xH200",
     ("full", 4096, 8, _BF16), ("none", 4, "full", "pin.precision=bf16 pin.loss=eager"), 10471),
    ("8B full, four H200", _FORGE, _LLAMA_8B, "4xH200",
     ("full", 4096, 32, _BF16), ("fsdp", 4, "full", "pin.precision=bf16 pin.loss=eager"), 9745.8),
    ("8B full, eight H100 of 96 GB", "torchtitan, performance", _LLAMA_8B, "8xH100-96GB-HBM2e",
     ("full", 8192, 16, ""), ("fsdp", 2, "selective", "pin.loss=eager"), 6667),
    ("8B full, eight H100, context parallel", "NVIDIA dgxc-benchmarking", _LLAMA_8B, "8xH100-SXM5-80GB",
     ("full", 8192, 128, ""), ("zero1", 1, "auto", ""), 10254),
    ("8B LoRA, one H100", _MODEL, _LLAMA_8B, "1xH100-SXM5-80GB",
     ("lora", 4096, 32, ""), ("none", 2, "none", ""), 12472.87),
    ("7B LoRA, one H100", _MODEL, _QWEN_7B, "1xH100-SXM5-80GB",
     ("lora", 4096, 32, ""), ("none", 2, "none", ""), 14110.05),
    ("32B LoRA, eight H100, tensor parallel", _MODEL, _QWEN_32B, "8xH100-SXM5-80GB",
     ("lora", 4096, 32, ""), ("fsdp", 2, "full", ""), 2250.31),
    ("70B LoRA, eight H100, tensor parallel", _MODEL, _LLAMA_70B, "8xH100-SXM5-80GB",
     ("lora", 4096, 32, ""), ("fsdp", 2, "full", ""), 1091.85),
    ("70B full, 64 H100, context parallel", _MODEL, _LLAMA_70B, "8x8xH100-SXM5-80GB",
     ("full", 8192, 128, ""), ("fsdp", 2, "full", ""), 866.77),
    ("70B full, eight A100, host offload", _TUNE, _LLAMA_70B, "8xA100-SXM4-80GB",
     ("full", 2048, 16, _BF16), ("fsdp", 2, "full", "pin.precision=bf16 pin.offload=optimizer+params"), 1568 / 8),
    ("70B LoRA, eight A100", _TUNE, _LLAMA_70B, "8xA100-SXM4-80GB",
     ("lora", 2048, 16, _RANK_8), ("fsdp", 2, "full", ""), 3497 / 8),
)  # fmt: skip
PUBLISHED = tuple(Published(*run) for run in _RUNS)


def tables() -> dict[str, str]:
    """The tables of docs/strategies.md by the name of their markers."""
    return {
        "golden": markdown_table(("job and machine", "choice"), [(case.name, _choice(case)) for case in GOLDEN]),
        "combinations": markdown_table(
            ("row of the table", "as in the row", "the planner's own choice (`train.method: auto`)"),
            [(case.name, _choice(case), _choice(case, "train.method=auto")) for case in COMBINATIONS],
        ),
        "within-8-gb": markdown_table(
            ("job", "choice", "outside the card"),
            [(case.name, _choice(case), _off_the_card(case)) for case in WITHIN_8_GB],
        ),
        "published": markdown_table(
            ("published run", "tokens/s a GPU", "predicted, pinned to its configuration", "predicted, own choice"),
            [run.cells() for run in PUBLISHED],
        ),
        "first-screen": _captured(f"$ {PRINTED.command}", text_of(PRINTED.first_screen())),
        "sections": _captured(
            f"$ {PRINTED.command} --show memory,why", explain_plan(PRINTED.plan(), show=("memory", "why"))
        ),
    }


def _captured(*texts: str) -> str:
    """Output as a block of code."""
    lines = (line for text in texts for line in text.splitlines())
    return "".join(f"    {line}\n" if line else "\n" for line in lines)


def _choice(case: Case, *overrides: str) -> str:
    try:
        plan = case.plan(*overrides)
    except InputError as error:
        return str(error).splitlines()[0].partition("; ")[0]
    except NothingFitsError as error:
        first, *_ = str(error).splitlines()
        return f"nothing fits: needs {first.partition(' needs ')[2]}"
    chosen = plan.chosen
    hours = run_hours(context_of(plan), chosen)
    moved = ", activations in host RAM" if chosen.activation_offload else ""
    moved += ", embeddings in host RAM" if chosen.embedding_on_host else ""
    return (
        f"{chosen.method}, `{chosen.strategy.name}`, {chosen.micro_batch} x {chosen.accumulation}, recompute "
        f"{chosen.checkpointing}{moved}; {format_bytes(chosen.memory.need_bytes)}, {format_seconds(hours * 3600)}"
    )


def _off_the_card(case: Case) -> str:
    memory = case.plan().chosen.memory
    nvme = f", {format_bytes(memory.nvme_bytes)} on NVMe" if memory.nvme_bytes else ""
    return f"{format_bytes(memory.pinned_bytes + memory.host_bytes)} of host RAM{nvme}"


if __name__ == "__main__":
    sys.exit(run_page(DOCUMENT, tables, command=__file__, summary=(__doc__ or "").splitlines()[0]))
