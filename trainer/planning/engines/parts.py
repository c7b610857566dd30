"""Shares of a rank, and bytes of gathered blocks.

An engine that cuts tensors by rows pads one whose rows do not divide evenly to the number of ranks times the largest
share: 8 experts over 64 ranks are 64 rows, 56 of them empty. The first rank then has a row of every tensor, and a
gathered or reduced tensor is as large as its padded form.
"""

from shardwise.trainer.planning.configuration import Configuration, once
from shardwise.trainer.planning.policy.precision_policy import (
    Dims,
    PrecisionPolicy,
    adapter_parameters,
    traced_adapters,
)
from shardwise.trainer.spec.optimizers import Pieces
from shardwise.trainer.spec.strategy import Method


def share(num_elements: int, degree: int) -> int:
    """The largest share of a rank."""
    return -(-num_elements // degree)


@once
def block_shard(dims: Dims, degree: int) -> int:
    """Elements of one block on the first rank, of the largest kind."""
    if dims.traced is not None:
        return max(shards_of_kinds(dims, degree))
    linear = sum(
        share(copies, degree) * num_inputs * num_outputs if copies > 1 else share(num_outputs, degree) * num_inputs
        for num_inputs, num_outputs, copies in dims.matrices
    )
    return linear + share(dims.block - dims.linear, degree)


@once
def shards_of_kinds(dims: Dims, degree: int) -> tuple[int, ...]:
    """Elements of a block of each traced kind on the first rank."""
    assert dims.traced is not None
    return tuple(
        sum(count * share(rows, degree) * elements for rows, elements, count in kind.tensors)
        for kind in dims.traced.kinds
    )


def largest_shard(dims: Dims, degree: int) -> int:
    """Elements of the whole model on the first rank."""
    num_tables = 1 if dims.is_tied else 2
    if dims.traced is None:
        rest, blocks = dims.parameters - dims.layers * dims.block, dims.layers * block_shard(dims, degree)
    else:
        counts = (count for count, _ in dims.kinds)
        rest = dims.root
        blocks = sum(count * each for count, each in zip(counts, shards_of_kinds(dims, degree), strict=True))
    rest -= num_tables * dims.embedding
    table = share(dims.vocab, degree) * dims.hidden
    return blocks + num_tables * table + share(max(0, rest), degree)


def gathered_block(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes of a gathered block, of the largest kind."""
    if dims.traced is not None:
        return max(gathered_kinds(configuration, policy, dims))
    adapters = policy.compute_bytes * adapter_parameters(configuration, dims)
    if configuration.method is Method.QLORA:
        return dims.linear // 2 + policy.compute_bytes * (dims.block - dims.linear) + adapters
    is_padded = policy.pieces is Pieces.SHARDS
    padded = policy.shard_degree * block_shard(dims, policy.shard_degree) if is_padded else dims.block
    return policy.compute_bytes * max(padded, dims.block) + adapters


def all_blocks(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes of all blocks, gathered."""
    if dims.traced is None:
        return dims.layers * gathered_block(configuration, policy, dims)
    of_kinds = gathered_kinds(configuration, policy, dims)
    return sum(of_kinds[kind] for kind in dims.traced.order)


def gathered_kinds(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> tuple[int, ...]:
    """Bytes of a gathered block of each traced kind."""
    assert dims.traced is not None
    adapters = traced_adapters(dims.traced, configuration.method)
    found = []
    for kind, shard, adapted in zip(
        dims.traced.kinds, shards_of_kinds(dims, policy.shard_degree), adapters, strict=True
    ):
        elements = policy.shard_degree * shard if policy.pieces is Pieces.SHARDS else kind.num_parameters
        num_bytes = policy.compute_bytes * (elements + sum(each.num_elements for each in adapted))
        if configuration.method is Method.QLORA:
            packed = sum(each.num_parameters for each in kind.linears if each.is_linear_module)
            num_bytes -= packed * policy.compute_bytes - packed // 2
        found.append(num_bytes)
    return tuple(found)
