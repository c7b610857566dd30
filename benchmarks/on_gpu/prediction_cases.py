"""The configurations whose predictions are put to the test: what is about a case is pinned, so that its plan is it.

The first twenty are a sample of everything that follows, in case only they are run: every model, method and loss head,
every precision and place of state, short rows and long ones, and both sides of the edge of an H200. What needs a
library that is not there, or a card that has FP8, is refused with its reason.

At the edge (`is_edge`) the card is all but too small, or just is: there a plan that says "fits", or does not, is put
to the test. In a rehearsal, and on another card, those cases are as good as any other.
"""

from on_gpu.case import Case

NUM_STEPS = 8  # two that allocate and warm up, one whose memory is measured, five that are timed
NUM_STEPS_LONG = 5  # of cases whose steps take seconds
ANY_ROW = "[offload_cpu, bf16_weights, optimizer_8bit, optimizer_approx, fp8, compile]"
Q05, Q15, Q3 = "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"
L1, L3, L8 = "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"
EDGE = "edge: "  # begins the name of a case at the edge of the card
_LONG_ROWS = 16384


def case_of(model: str, rows: str, *axes: str, prefix: str = "", **pins: str) -> Case:
    """A case of `rows` ("4x2048": sequences of a micro batch, and their tokens) that fixes every mechanism.

    `axes` are method, precision, optimizer, checkpointing and loss, in this order; `pins` what differs beside them.
    """
    method, precision, optimizer, checkpointing, loss = axes
    micro_batch, _, seq_len = rows.partition("x")
    settings = {
        "train.method": method,
        "allow": ANY_ROW,
        "pin.precision": precision,
        "pin.optimizer": optimizer,
        "pin.checkpointing": checkpointing,
        "pin.loss": loss,
        "pin.sharding": "none",
        "pin.offload": "none",
        "pin.attention": "sdpa",
        "pin.compile": "false",
        "pin.activation_offload": "false",
        "pin.optimizer_in_backward": "false",
    } | {f"pin.{name}": value for name, value in pins.items()}
    is_long = prefix == EDGE or int(seq_len) >= _LONG_ROWS
    return Case(
        name=prefix + " ".join([model, *axes, *(f"{name}={value}" for name, value in pins.items()), rows]),
        model=model,
        settings=settings,
        seq_len=int(seq_len),
        micro_batch=int(micro_batch),
        num_steps=NUM_STEPS_LONG if is_long else NUM_STEPS,
    )


def is_edge(case: Case) -> bool:
    """Whether a case is at the edge of the card that these cases are written for."""
    return case.name.startswith(EDGE)


def _edge(model: str, rows: str, *axes: str) -> Case:
    return case_of(model, rows, *axes, prefix=EDGE)


def _full(model: str, rows: str, *axes: str, **pins: str) -> Case:
    return case_of(model, rows, "full", *axes, **pins)


def _lora(model: str, rows: str, *axes: str) -> Case:
    return case_of(model, rows, "lora", *axes)


def _qlora(model: str, rows: str, *axes: str) -> Case:
    return case_of(model, rows, "qlora", *axes)


def _galore(model: str, rows: str, *axes: str) -> Case:
    return case_of(model, rows, "galore", *axes)


_ON_HOST = {"sharding": "zero2", "offload": "optimizer"}
_ALL_ON_HOST = {"sharding": "zero3", "offload": "optimizer+params"}

FIRST: tuple[Case, ...] = (
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "none", "eager"),
    _full(L1, "4x2048", "bf16", "adamw_fused", "full", "fused"),
    _lora(L1, "4x2048", "bf16-mixed", "adamw_fused", "none", "chunked"),
    _full(Q15, "4x4096", "bf16-mixed", "adamw", "full", "chunked"),
    _lora(L8, "2x4096", "bf16-mixed", "adamw_fused", "full", "fused"),
    _full(Q3, "2x4096", "bf16-mixed", "adamw_fused", "selective", "chunked"),
    _full(L8, "1x8192", "bf16", "adamw_fused", "full", "chunked"),
    _full(L1, "2x1024", "fp32", "adamw_fused", "none", "eager"),
    _full(Q05, "16x512", "bf16", "adafactor", "none", "fused"),
    _full(L1, "1x32768", "bf16", "adamw_fused", "full", "chunked"),
    _edge(L3, "10x2048", "full", "bf16-mixed", "adamw_fused", "none", "chunked"),
    _full(L1, "4x2048", "bf16-mixed", "adamw_8bit", "full", "chunked"),
    _qlora(L8, "2x2048", "bf16-mixed", "paged_adamw_8bit", "full", "fused"),
    _galore(Q15, "4x2048", "bf16", "adamw", "none", "chunked"),
    _full(Q3, "2x2048", "bf16-mixed", "deepspeed_cpu_adam", "full", "chunked", **_ON_HOST),
    _full(Q15, "2x2048", "bf16-mixed", "deepspeed_cpu_adam", "full", "chunked", **_ALL_ON_HOST),
    _full(L3, "4x2048", "fp8", "adamw_fused", "full", "fused"),
    _full(L3, "2x8192", "bf16", "adamw_fused", "full", "fused_linear"),
    _edge(Q05, "18x2048", "full", "bf16-mixed", "adamw_fused", "none", "eager"),
    _lora(Q3, "8x1024", "bf16", "adamw_fused", "selective", "eager"),
)

MORE: tuple[Case, ...] = (
    # Loss heads and recomputation on one model, all else equal.
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "none", "chunked"),
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "none", "fused"),
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "none", "fused_linear"),
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "full", "eager"),
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "full", "chunked"),
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "selective", "chunked"),
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "attention", "chunked"),
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "every_n", "chunked"),
    # Optimizers, where the step is the peak and where it is not.
    _full(Q15, "1x1024", "bf16-mixed", "adamw", "full", "chunked"),
    _full(Q15, "1x1024", "bf16-mixed", "adamw_fused", "full", "chunked"),
    _full(Q15, "1x1024", "bf16", "adamw_8bit", "full", "chunked"),
    _full(Q15, "1x1024", "bf16", "paged_adamw_8bit", "full", "chunked"),
    _full(Q15, "1x1024", "bf16", "paged_adamw", "full", "chunked"),
    _full(L1, "1x1024", "bf16", "adafactor", "full", "chunked"),
    _full(L1, "4x1024", "bf16", "adamw_8bit", "none", "eager"),
    _full(L3, "1x2048", "bf16", "adafactor", "full", "chunked"),
    _full(L1, "2x2048", "bf16", "lomo", "full", "chunked"),
    _full(Q15, "2x2048", "bf16-mixed", "adamw_fused", "full", "chunked", optimizer_in_backward="true"),
    # Precisions.
    _full(L1, "4x2048", "bf16-mixed", "adamw_fused", "none", "chunked"),
    _full(L1, "4x2048", "bf16", "adamw_fused", "none", "chunked"),
    _full(L1, "4x2048", "fp8", "adamw_fused", "none", "chunked"),
    _full(Q05, "4x1024", "fp32", "adamw", "full", "chunked"),
    _full(Q15, "2x2048", "fp32", "adamw_fused", "none", "fused"),
    _full(L8, "2x2048", "fp8", "adamw_8bit", "full", "fused"),
    # Lengths.
    _full(Q05, "1x32768", "bf16-mixed", "adamw_fused", "full", "chunked"),
    _full(Q15, "1x16384", "bf16", "adamw_fused", "selective", "chunked"),
    _full(Q3, "1x32768", "bf16", "adamw_fused", "full", "chunked"),
    _full(L8, "32x512", "bf16", "adamw_fused", "full", "chunked"),
    _full(L3, "4x4096", "bf16-mixed", "adamw_fused", "selective", "fused"),
    _lora(L8, "1x32768", "bf16-mixed", "adamw_fused", "full", "chunked"),
    # Adapters.
    _lora(Q05, "8x2048", "bf16-mixed", "adamw_fused", "none", "eager"),
    _lora(Q3, "4x2048", "bf16-mixed", "adamw", "full", "chunked"),
    _lora(L3, "2x4096", "bf16", "adamw_fused", "none", "fused"),
    _lora(L8, "2x2048", "bf16", "adamw_fused", "none", "chunked"),
    _qlora(L1, "4x2048", "bf16-mixed", "adamw_fused", "none", "eager"),
    _qlora(Q3, "4x2048", "bf16-mixed", "paged_adamw", "full", "chunked"),
    _qlora(L8, "1x16384", "bf16", "adamw_8bit", "full", "chunked"),
    # GaLore.
    _galore(Q05, "4x2048", "bf16-mixed", "adamw", "none", "chunked"),
    _galore(L1, "4x2048", "bf16", "adamw_8bit", "full", "fused"),
    _galore(L3, "2x2048", "bf16", "adafactor", "full", "chunked"),
    # State in host RAM, on one card.
    _full(L1, "4x2048", "bf16-mixed", "deepspeed_cpu_adam", "none", "chunked", **_ON_HOST),
    _full(L3, "2x4096", "bf16-mixed", "deepspeed_cpu_adam", "full", "fused", **_ALL_ON_HOST),
    _full(L8, "1x4096", "bf16-mixed", "adamw_fused", "full", "chunked"),
    # Attention and compiled blocks.
    _full(L1, "4x2048", "bf16", "adamw_fused", "none", "chunked", attention="eager"),
    _full(L1, "4x2048", "bf16", "adamw_fused", "none", "chunked", attention="flash"),
    _full(L1, "4x2048", "bf16-mixed", "adamw_fused", "none", "chunked", compile="true"),
    _full(Q15, "4x2048", "bf16", "adamw_fused", "full", "eager", compile="true"),
    _full(L1, "4x4096", "bf16", "adamw_fused", "none", "chunked", activation_offload="true"),
    # The edge of an H200, from both sides: by fp32 states, by logits, by activations.
    _edge(L8, "3x16384", "full", "bf16-mixed", "adamw_fused", "full", "chunked"),
    _edge(L8, "7x8192", "full", "bf16-mixed", "adamw_fused", "full", "chunked"),
    _edge(Q05, "17x2048", "full", "bf16-mixed", "adamw_fused", "none", "eager"),
    _edge(Q3, "26x2048", "full", "bf16", "adamw_fused", "full", "eager"),
    _edge(L3, "11x2048", "full", "bf16-mixed", "adamw_fused", "none", "chunked"),
    _edge(L8, "10x2048", "lora", "bf16", "adamw_fused", "none", "chunked"),
    _edge(L8, "11x2048", "lora", "bf16", "adamw_fused", "none", "chunked"),
    _edge(L8, "10x4096", "full", "bf16", "adamw_fused", "selective", "fused"),
)

CASES = FIRST + MORE

# Cases of which the smallest card is looked for, each for what decides its margin: logits, the optimizer's step, the
# backward of a block, adapters, state in 8 bit, activations that are kept, projections, state on the host.
CAPPED: tuple[Case, ...] = (
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "none", "eager"),
    _full(L1, "4x2048", "bf16", "adamw_fused", "full", "fused"),
    _full(Q15, "1x1024", "bf16-mixed", "adamw", "full", "chunked"),
    _lora(L1, "4x2048", "bf16-mixed", "adamw_fused", "none", "chunked"),
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "full", "eager"),
    _full(L1, "4x2048", "bf16-mixed", "adamw_8bit", "full", "chunked"),
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "selective", "chunked"),
    _galore(Q15, "4x2048", "bf16", "adamw", "none", "chunked"),
    _full(L1, "4x2048", "bf16-mixed", "deepspeed_cpu_adam", "none", "chunked", **_ON_HOST),
    _full(L1, "1x32768", "bf16", "adamw_fused", "full", "chunked"),
)

# Run once more without expandable segments, recomputed and not.
ALLOCATED: tuple[Case, ...] = (
    _full(Q05, "4x2048", "bf16-mixed", "adamw_fused", "none", "eager"),
    _full(Q15, "4x4096", "bf16-mixed", "adamw", "full", "chunked"),
    _lora(L1, "4x2048", "bf16-mixed", "adamw_fused", "none", "chunked"),
    _full(Q3, "2x4096", "bf16-mixed", "adamw_fused", "selective", "chunked"),
)

# Each way that weights come onto one device.
LOADED: tuple[Case, ...] = (
    _full(L1, "2x1024", "fp32", "adamw_fused", "none", "eager"),
    _lora(L8, "2x4096", "bf16-mixed", "adamw_fused", "full", "fused"),
    _qlora(L8, "2x2048", "bf16-mixed", "paged_adamw_8bit", "full", "fused"),
)
