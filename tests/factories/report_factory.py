"""Complete reports, candidates and records of earlier runs for tests that are about something else."""

from typing import Any

import msgspec

from shardwise.trainer.spec import plan as plans
from shardwise.trainer.spec import report as reports
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Calibration, CalibrationRecord, Candidate, RatesSource
from shardwise.trainer.spec.report import Ending, Evaluation, MemoryFigures, Report, Sample, Verified
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision, Strategy

MIB = 2**20


def make_candidate(**changes: object) -> Candidate:
    candidate = Candidate(
        strategy=Strategy(
            name="none/fp32/adamw", sharding=Sharding.NONE, offload=Offload.NONE, optimizer=Optimizer.ADAMW,
            precision=Precision.FP32, is_exact=True,
        ),
        method=Method.FULL, num_ranks=1, micro_batch=4, accumulation=2, seq_len=128,
        checkpointing=Checkpointing.NONE, attention=Attention.SDPA, loss=LossHead.CHUNKED,
        memory=plans.MemoryEstimate(
            parts={"weights": 10 * MIB, "optimizer_state": 20 * MIB}, peak_event="step", events={"step": 30 * MIB},
            steady_allocated_bytes=30 * MIB, peak_allocated_bytes=30 * MIB, peak_reserved_bytes=30 * MIB,
            device_bytes=40 * MIB, low_bytes=28 * MIB, high_bytes=34 * MIB, need_bytes=33 * MIB,
            usable_bytes=1000 * MIB,
        ),
        speed=plans.SpeedEstimate(
            parts={"compute_s": 1.0}, step_s=1.0, tokens_per_s_per_gpu=1024.0, flops_per_token=1e7,
            peak_flops_per_s=None, mfu=None,
        ),
    )  # fmt: skip
    return msgspec.structs.replace(candidate, **changes)


def make_report(**changes: object) -> Report:
    report = Report(
        ending=Ending.FINISHED, exit_code=0, plan=make_candidate(),
        predicted=reports.Figures(
            memory=MemoryFigures(peak_allocated_bytes=30 * MIB, parts={"weights": 10 * MIB}),
            speed=reports.SpeedFigures(step_s=1.0, tokens_per_s_per_gpu=1024.0),
        ),
        measured=reports.Figures(
            memory=MemoryFigures(peak_allocated_bytes=25 * MIB, parts={"weights": 10 * MIB, "gradients": 3 * MIB}),
            speed=reports.SpeedFigures(step_s=0.8, tokens_per_s_per_gpu=1280.0, targets_per_s_per_gpu=1270.0),
        ),
        verified=Verified(
            world_size=1, engine_class="LlamaForCausalLM", sharded_parameters=0, partition_elements=None,
            optimizer_class="AdamW", attention="sdpa", loss="chunked", precision="fp32", accumulation=2,
        ),
        incidents=(), versions={"torch": "2.13.0"}, step=10, num_steps=10, tokens=10240, duration_s=12.0,
        final_loss=4.5,
        evaluations=(Evaluation(step=10, loss=4.0, perplexity=54.6, num_tokens=512, unigram_entropy_nats=6.0),),
        sample=Sample(prompt="def ", before="x x", after="main():\n    pass"),
        checkpoint="checkpoints/step-00000010", export="export",
    )  # fmt: skip
    return msgspec.structs.replace(report, **changes)


def record_of(step: float = 1.0, peak: float = 1.0, **facts: Any) -> CalibrationRecord:
    """A run of an 8B model under FSDP that measured these multiples of what was predicted."""
    return CalibrationRecord(
        **{
            "device": "H100-SXM5-80GB", "driver": None, "torch": "2.13.0", "strategy": "fsdp/bf16-mixed/adamw_fused",
            "predicted_peak_bytes": 50 * 10**9, "measured_peak_bytes": round(peak * 50 * 10**9),
            "predicted_step_s": 2.0, "measured_step_s": 2.0 * step, "finished_at": "2026-01-01T00:00:00+00:00",
            "shardwise": "0", "rates": RatesSource.DATASHEET, "method": Method.FULL, "sharding": Sharding.FSDP,
            "offload": Offload.NONE, "precision": Precision.BF16_MIXED, "model_type": "llama",
            "num_parameters": 8_030_261_248, **facts,
        }
    )  # fmt: skip


def calibration_of(*records: CalibrationRecord) -> Calibration:
    return Calibration(records=records)
