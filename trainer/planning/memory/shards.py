"""The share of each weight on one rank under FSDP2, which distributes the rows of a tensor.

A tensor whose rows do not divide evenly is padded to as many as the ranks times the largest share: 8 experts over 64
ranks are 64 rows, 56 of them empty. The first rank then holds a row of everything, and a gathered or reduced tensor is
as large as its padded form.
"""

from trainer.planning.memory.recipe import Dims


def share(num_elements: int, degree: int) -> int:
    """The largest share of a rank."""
    return -(-num_elements // degree)


def block_shard(dims: Dims, degree: int) -> int:
    """Elements of one block on the first rank."""
    linear = sum(
        share(copies, degree) * num_inputs * num_outputs if copies > 1 else share(num_outputs, degree) * num_inputs
        for num_inputs, num_outputs, copies in dims.matrices
    )
    return linear + share(dims.block - dims.linear, degree)


def table_shard(dims: Dims, degree: int) -> int:
    """Elements of the embedding, or of the head, on the first rank."""
    return share(dims.vocab, degree) * dims.hidden


def largest_shard(dims: Dims, degree: int) -> int:
    """Elements of the whole model on the first rank."""
    num_tables = 1 if dims.is_tied else 2
    rest = dims.parameters - dims.layers * dims.block - num_tables * dims.embedding
    return (
        dims.layers * block_shard(dims, degree) + num_tables * table_shard(dims, degree) + share(max(0, rest), degree)
    )
