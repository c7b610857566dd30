"""Seconds of one optimizer step on the device: bytes through memory, and the products that some update rules take.

    foreach AdamW   21 reads and writes a parameter: a kernel for each operation of the update rule
    fused           7: weight, gradient and two moments read, three of them written
    8-bit           4 bytes of moments, then weight read and written and gradient read
    GaLore          the gradient projected and the update projected back, 4 m n r FLOPs of an m x n matrix (m <= n), and
                    every update_gap steps a singular value decomposition of it, 22 m^2 n
    Muon            five Newton-Schulz steps of 4 m^2 n + 2 m^3 each, on every rank
    paged           state that does not fit beside weights and gradients crosses PCIe twice a step

Clipping reads each gradient twice and writes it: 6 bytes. Under offload the CPU updates instead (`speed_transfers`).
"""

from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.memory.stacks import stack_of
from shardwise.trainer.planning.setting import Setting
from shardwise.trainer.planning.speed import constants as constants
from shardwise.trainer.planning.speed.rates import Rates
from shardwise.trainer.planning.speed.work import Work
from shardwise.trainer.spec.strategy import Method, Offload

_CLIPPING_BYTES = 6
_NEWTON_SCHULZ_STEPS = 5


def optimizer_seconds(setting: Setting, work: Work, rates: Rates, device: Device, trained: int) -> float:
    """Seconds of the update itself; 0 where the host does it."""
    strategy = setting.strategy
    if strategy.offload is not Offload.NONE:
        return 0.0
    mine = trained / (setting.num_ranks if strategy.sharding.shards_optimizer else 1)
    facts = strategy.optimizer.facts
    if facts.fused_form is not None and stack_of(setting.stack).fuses_adamw:
        facts = facts.fused_form.facts
    moved = facts.passes * strategy.precision.master_bytes + facts.state_traffic_bytes + _CLIPPING_BYTES
    seconds = mine * moved / rates.memory
    if setting.method is Method.GALORE:
        seconds += _projection_seconds(setting, work, rates)
    if facts.orthogonalises_matrices:
        seconds += _orthogonalisation_seconds(work, rates)
    return seconds + 2 * _bytes_paged_out(setting, device, mine) / rates.pcie


def _projection_seconds(setting: Setting, work: Work, rates: Rates) -> float:
    rank, gap = setting.galore.rank, setting.galore.update_gap
    products = decompositions = 0.0
    for group in work.linears:
        count, short = group.num_layers * group.num_copies, min(group.inputs, group.outputs)
        products += count * 4.0 * group.inputs * group.outputs * min(rank, short)
        decompositions += count * 22.0 * short * group.inputs * group.outputs
    return products / rates.matmul + decompositions / (constants.SVD_SHARE * rates.fp32) / gap


def _orthogonalisation_seconds(work: Work, rates: Rates) -> float:
    flops = 0.0
    for group in work.linears:
        short, long = sorted((group.inputs, group.outputs))
        flops += group.num_layers * group.num_copies * (4.0 * short * short * long + 2.0 * short**3)
    return _NEWTON_SCHULZ_STEPS * flops / rates.matmul


def _bytes_paged_out(setting: Setting, device: Device, mine: float) -> float:
    """State in managed memory that has no room on the device between two steps."""
    state = setting.strategy.optimizer.facts.paged_bytes * mine
    if not state:
        return 0.0
    gradient = 0 if setting.optimizer_in_backward else setting.strategy.precision.master_bytes
    held = mine * (setting.strategy.precision.master_bytes + gradient)
    return min(state, max(0.0, held + state + device.context_bytes - device.usable_bytes))
