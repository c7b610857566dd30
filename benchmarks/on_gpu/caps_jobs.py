"""The jobs of piece `caps`: for each size of card what people train on it, and what just fits.

A job fixes the model, the rows, the method and the tokens of a step, and what may be used beside exact strategies on
the device; everything else is the planner's. In a rehearsal the model is tiny, and a cap of so many GiB is a place
between the least that its job can do with and what it would take if nothing limited it.
"""

from msgspec.structs import replace

from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.models import model_config
from trainer.planning.catalogue import CATALOGUE
from trainer.planning.limits_search import longest_sequences
from trainer.planning.rules import may_run
from trainer.planning.settings_search import least_need
from trainer.planning.situation import Situation
from trainer.spec.model_shape import ModelShape, read_model_shape
from trainer.spec.plan import Candidate
from trainer.spec.strategy import Offload
from trainer.spec.units import GIB
from trainer.spec.value import Value

USUAL_SEQ_LEN = 2048
_TINY_ROWS, _TINY_LONGEST = (256, 16), (4096, 1)  # of a rehearsal: enough activations for a cap to bind
_TINY_SHARES = {8: 0.2, 12: 0.35, 16: 0.5, 24: 0.65, 48: 0.8, 80: 0.95}

_INEXACT = "[offload_cpu, bf16_weights, optimizer_8bit]"
_ANY_UPDATE = "[offload_cpu, bf16_weights, optimizer_8bit, optimizer_approx]"


class CapJob(Value, frozen=True, kw_only=True):
    """A job under a cap; `words` say it in a table."""

    cap_gib: int
    words: str
    model: str  # a preset, with drawn weights
    settings: dict[str, str]
    seq_len: int | None = USUAL_SEQ_LEN  # None: the longest rows that fit with all state on the device
    rows: int = 16  # of a step
    host_bytes_per_parameter: int | None = None  # host RAM that the job may take
    num_steps: int = 6

    @property
    def name(self) -> str:
        return f"{self.cap_gib} GiB, {self.words}"


def _lora(rank: int) -> dict[str, str]:
    return {"train.method": "lora", "train.lora.rank": str(rank), "train.lora.alpha": str(2 * rank)}


_QLORA = _lora(16) | {"train.method": "qlora"}
_FULL = {"train.method": "full"}

JOBS: tuple[CapJob, ...] = (  # in the order of their steps: what matters most comes first
    CapJob(cap_gib=8, words="1B, LoRA rank 8", model="llama-3.2-1b", settings=_lora(8)),
    CapJob(
        cap_gib=8,
        words="7B, all parameters, at most 10 bytes a parameter in host RAM",
        model="llama-2-7b",
        settings=_FULL | {"allow": _ANY_UPDATE},
        seq_len=1024,
        host_bytes_per_parameter=10,
        num_steps=5,
    ),
    CapJob(cap_gib=24, words="7B, LoRA rank 16", model="llama-2-7b", settings=_lora(16)),
    CapJob(cap_gib=24, words="8B, QLoRA rank 16", model="llama-3.1-8b", settings=_QLORA),
    CapJob(
        cap_gib=8, words="1B, LoRA rank 8, longest rows", model="llama-3.2-1b", settings=_lora(8), seq_len=None, rows=1
    ),
    CapJob(cap_gib=12, words="3B, LoRA rank 16", model="llama-3.2-3b", settings=_lora(16)),
    CapJob(cap_gib=12, words="1B, all parameters", model="llama-3.2-1b", settings=_FULL),
    CapJob(cap_gib=16, words="3B, LoRA rank 16", model="llama-3.2-3b", settings=_lora(16)),
    CapJob(
        cap_gib=16, words="8B, QLoRA rank 16, longest rows", model="llama-3.1-8b", settings=_QLORA, seq_len=None, rows=1
    ),
    CapJob(cap_gib=48, words="3B, all parameters", model="llama-3.2-3b", settings=_FULL),
    CapJob(cap_gib=48, words="13B, LoRA rank 32", model="llama-2-13b", settings=_lora(32)),
    CapJob(cap_gib=80, words="7B, all parameters", model="llama-2-7b", settings=_FULL | {"allow": _INEXACT}),
    CapJob(cap_gib=80, words="8B, LoRA rank 16", model="llama-3.1-8b", settings=_lora(16)),
)


def shape_of(job: CapJob, *, is_tiny: bool) -> ModelShape:
    """The shape of a job's model."""
    return read_model_shape(model_config(job.model, is_tiny=is_tiny), origin=job.model)


def settings_of(job: CapJob, *, is_tiny: bool) -> dict[str, str]:
    """Of the job file: what a job fixes, its rows and its cap left out."""
    if job.host_bytes_per_parameter is None:
        return job.settings
    num_parameters = shape_of(job, is_tiny=is_tiny).num_parameters
    return job.settings | {"limits.host_ram": str(job.host_bytes_per_parameter * num_parameters)}


def case_of(job: CapJob, bench: Bench) -> Case:
    """A job as a case without a pin; one with the longest rows has rows of the usual length until they are known."""
    case = Case(
        name=job.name,
        model=job.model,
        settings=settings_of(job, is_tiny=bench.is_tiny),
        seq_len=job.seq_len or USUAL_SEQ_LEN,
        micro_batch=None,
        accumulation=job.rows,  # all rows of a step: the planner cuts them
        vram_bytes=job.cap_gib * GIB,
        num_steps=job.num_steps,
    )
    if not bench.is_tiny:
        return case
    return with_rows(case, bench, *(_TINY_LONGEST if job.seq_len is None else _TINY_ROWS))


def with_rows(case: Case, bench: Bench, seq_len: int, rows: int) -> Case:
    """A case with rows of exactly this length, whatever a rehearsal makes of its `seq_len`."""
    words = {
        "data.train": str(bench.rows_of(case.model, seq_len)),
        "train.seq_len": str(seq_len),
        "train.tokens_per_step": str(seq_len * rows),
    }
    return replace(case, accumulation=rows, settings=case.settings | words)


def without_paths(case: Case) -> Case:
    """The case as it is kept: the file of its rows is this machine's."""
    return replace(case, settings={key: words for key, words in case.settings.items() if key != "data.train"})


def longest_rows(situation: Situation) -> int:
    """Tokens of the longest rows that fit with weights and optimizer on the device, as the planner sees it."""
    rungs = longest_sequences({situation.method: situation})
    sizes = [rung.size for rung in rungs if rung.candidate.strategy.offload is Offload.NONE]
    sizes = sizes or [rung.size for rung in rungs]
    return min(max(sizes), situation.shape.max_positions or max(sizes))


def tiny_cap_bytes(job: CapJob, situation: Situation, unlimited: Candidate) -> int:
    """The cap of a rehearsal, from a plan of the job that nothing limits."""
    rows = (row for row in CATALOGUE if may_run(situation, row))
    least = min(least_need(situation, row).memory.need_bytes for row in rows)
    return round(least + _TINY_SHARES[job.cap_gib] * (unlimited.memory.need_bytes - least))
