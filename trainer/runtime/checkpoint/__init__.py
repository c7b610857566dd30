"""Checkpoints that belong to no engine: saved under one sharding and world size, resumed under another.

A checkpoint is a folder `checkpoints/step-00000030` that holds MANIFEST.json and one safetensors file per rank. It
has its name only if it is complete: all files are written to a temporary folder, all ranks agree, and it is renamed.
Nothing in it is pickled and nothing of it is unpickled. docs/surviving.md describes the files.

    ranks = Ranks.distributed() if world_size > 1 else Ranks.alone()
    resumption = begin_resumption(root, check=..., on_skip=log, ranks=ranks)    # the newest, or None; hashed meanwhile
    model, optimizer = accelerator.prepare(model, optimizer)
    resumption.load(model, optimizer, sharding=sharding)                        # weights, moments, steps
    ...
    Save(root, model=model, optimizer=optimizer, sharding=sharding, facts=facts, ranks=ranks, keep=3).run()

A run that trains adapters saves these and their optimizer state; its frozen base is known by a fingerprint.
What is not in a checkpoint, because it is a function of the step: learning rate, data order, dropout seeds. Nor are
learning rate, weight decay and betas restored from one: the job decides them, the manifest only records them.
`engines` is the table of what has checkpoints.
"""

from shardwise.trainer.runtime.checkpoint.folders import find_checkpoint
from shardwise.trainer.runtime.checkpoint.load import (
    check_compatible,
    checkpoint_digest,
    import_state,
    import_weights,
    load_weights,
    read_weights,
    state_digest,
)
from shardwise.trainer.runtime.checkpoint.manifest import (
    CheckpointFacts,
    CheckpointFolder,
    LossScaler,
    Manifest,
    base_fingerprint,
    config_sha256,
    folder_name,
)
from shardwise.trainer.runtime.checkpoint.pieces import canonical_name
from shardwise.trainer.runtime.checkpoint.ranks import Ranks
from shardwise.trainer.runtime.checkpoint.save import Save
from shardwise.trainer.runtime.checkpoint.shards import NonFiniteStateError

__all__ = [
    "CheckpointFacts",
    "CheckpointFolder",
    "LossScaler",
    "Manifest",
    "NonFiniteStateError",
    "Ranks",
    "Save",
    "base_fingerprint",
    "canonical_name",
    "check_compatible",
    "checkpoint_digest",
    "config_sha256",
    "find_checkpoint",
    "folder_name",
    "import_state",
    "import_weights",
    "load_weights",
    "read_weights",
    "state_digest",
]
