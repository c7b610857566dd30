"""The least that each group of a step would take at the measured ceilings, counted from the model's shape.

    matrix products  their FLOPs at the rates measured for each shape: forward, backward twice, what is recomputed again
    attention        causal FLOPs at the rates measured for this head size and row: 1 forward, 2.5 backward
    the others       bytes that cannot be saved, at the rate of a copy within the device's memory:
      norms          2 elements moved of each that is normed in a forward, in one kernel; the backward moves twice that
      element-wise   residual 3, rotary 2 and its transposes 2, gated activation 3 elements each; backward twice that
      loss           each logit read in the forward, read and overwritten in the backward
      embedding      rows read and written, their gradients read, the table's gradient written
      optimizer      weights and state read and written, gradients read twice (their norm, the update)
      copies         the ids, labels and positions of a batch from host to device
    idle             nothing

The operators of norms and of element-wise work are counted as the planner counts them (trainer/planning/speed_work.py)
where one kernel does each.
"""

from collections.abc import Iterator, Mapping

from on_gpu.path_trace import Group
from trainer.planning.speed_work import work_of
from trainer.spec.model_shape import ModelShape
from trainer.spec.value import Value

RECOMPUTED = {"none": 0.0, "full": 1.0}  # of a block's forward
PRODUCT_BACKWARD, ATTENTION_BACKWARD = 2.0, 2.5  # FLOPs of the gradients, of those of a forward
INPUT_BYTES = 16  # an id and a label of a token


class Shape(Value, frozen=True, kw_only=True):
    """A matrix product of the forward: [tokens, inputs] x [inputs, outputs]."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.inputs * self.outputs

    @property
    def name(self) -> str:
        return f"{self.tokens} x {self.inputs} x {self.outputs}"


class Rates(Value, frozen=True, kw_only=True):
    """FLOP/s of a forward, and of what its gradients take."""

    forward: float
    backward: float

    def seconds(self, flops: float, *, num_forwards: float, backward: float) -> float:
        """Of so many forwards of `flops` each, and gradients that take `backward` times as many."""
        return flops * (num_forwards / self.forward + backward / self.backward)


class Ceilings(Value, frozen=True, kw_only=True):
    """What the device reaches; rates per second."""

    products: dict[str, Rates] = {}  # by the name of a shape
    attention: Rates | None = None
    start_s: float | None = None  # of one more small kernel, where the device waits for nothing else
    copy_bytes_per_s: float | None = None  # read and written, both count
    host_to_device_bytes_per_s: float | None = None
    device_to_host_bytes_per_s: float | None = None
    notes: tuple[str, ...] = ()


class StepWork(Value, frozen=True, kw_only=True):
    """What a step of one device does."""

    seq_len: int
    micro_batch: int
    accumulation: int
    checkpointing: str  # none or full
    element_bytes: int  # of activations
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int  # of the optimizer

    @property
    def tokens(self) -> int:
        """Of a micro batch."""
        return self.seq_len * self.micro_batch


def product_shapes(shape: ModelShape, tokens: int) -> dict[Shape, int]:
    """The products of a forward of so many tokens, and how often each is done; the head among them."""
    counts = {
        Shape(tokens=tokens, inputs=each.inputs, outputs=each.outputs): each.num_layers * each.num_used
        for each in work_of(shape).linears
    }
    head = Shape(tokens=tokens, inputs=shape.hidden_size, outputs=shape.vocab_size)
    return counts | {head: counts.get(head, 0) + 1}


def floors(shape: ModelShape, step: StepWork, ceilings: Ceilings) -> dict[Group, float]:
    """Seconds of each group of a step; one without a measured ceiling is left out."""
    return dict(_floors(shape, step, ceilings)) | {Group.IDLE: 0.0, Group.COMMUNICATION: 0.0}


def _floors(shape: ModelShape, step: StepWork, ceilings: Ceilings) -> Iterator[tuple[Group, float]]:
    again = RECOMPUTED[step.checkpointing]
    products = product_shapes(shape, step.tokens)
    if all(product.name in ceilings.products for product in products):
        head = Shape(tokens=step.tokens, inputs=shape.hidden_size, outputs=shape.vocab_size)
        seconds = sum(
            ceilings.products[product.name].seconds(
                count * product.flops,
                num_forwards=1 if product == head else 1 + again,
                backward=PRODUCT_BACKWARD,
            )
            for product, count in products.items()
        )
        yield Group.PRODUCTS, step.accumulation * seconds
    if ceilings.attention:
        flops = shape.num_layers * 2.0 * step.tokens * step.seq_len * shape.query_size
        seconds = ceilings.attention.seconds(flops, num_forwards=1 + again, backward=ATTENTION_BACKWARD)
        yield Group.ATTENTION, step.accumulation * seconds
    if ceilings.copy_bytes_per_s:
        for group, num_bytes in bytes_of(shape, step).items():
            yield group, num_bytes / ceilings.copy_bytes_per_s
    to_device = ceilings.host_to_device_bytes_per_s
    inputs = step.accumulation * step.tokens * INPUT_BYTES
    yield Group.COPIES, inputs / to_device if to_device else 0.0


def bytes_of(shape: ModelShape, step: StepWork) -> Mapping[Group, float]:
    """Bytes through the device's memory of a step, by group."""
    work, width = work_of(shape), step.element_bytes
    tokens = step.tokens * step.accumulation
    passes = 3 + RECOMPUTED[step.checkpointing]
    final_norm = shape.hidden_size  # which is not recomputed
    elements = 3 * work.added + 2 * work.rotated + 2 * work.moved + (3 if work.is_gated else 2) * work.activated
    table = shape.vocab_size * shape.hidden_size * width
    return {
        Group.NORM: 2.0 * width * tokens * (passes * work.normed + 3 * final_norm),
        Group.ELEMENTWISE: float(width * tokens * passes * elements),
        Group.LOSS: 3.0 * width * tokens * shape.vocab_size,
        Group.EMBEDDING: float(3 * width * tokens * shape.hidden_size + step.accumulation * table),
        Group.OPTIMIZER: 2.0 * (step.weight_bytes + step.state_bytes + step.gradient_bytes),
    }
