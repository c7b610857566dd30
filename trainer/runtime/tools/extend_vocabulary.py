"""A worker that writes a model folder with room for more tokens.

Tokens that a chat template brings, or that were added to a tokenizer, need rows in the embedding and in the head. The
folder that comes out is a model like any other, so every engine reads it as it reads any: the weight files without an
embedding are links to those of FOLDER, the others are written anew with the larger tensors.

A new row is the mean of the others with a little noise from a fixed seed, so that no two are the same. The mean barely
changes the probabilities of known tokens (Hewitt 2021, "Initializing new word embeddings for pretrained language
models"); random rows would lower all of them.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardwise.trainer.runtime.run.process import run_request_and_exit
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.worker_requests import ExtendVocabularyRequest, Lines

_NAMES = (
    "embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight",
    "lm_head.weight", "lm_head.bias", "embed_out.weight", "output_embeddings.weight",
)  # fmt: skip
_NOISE = 0.02  # of the spread of the rows
_SEED = 0


def extend_vocabulary(folder: Path, num_rows: int, out: Path) -> None:
    """Writes `out`, complete or not at all."""
    config = json.loads((folder / "config.json").read_bytes())
    part = config["text_config"] if "vocab_size" not in config and "text_config" in config else config
    before = part["vocab_size"]
    staging = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        num_extended = sum(
            _extend_file(path, staging / path.name, before, num_rows) for path in sorted(folder.glob("*.safetensors"))
        )
        if not num_extended:
            raise InputError(f"{folder}: no embedding of {before} rows was found; its vocabulary cannot be extended")
        for path in folder.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json":
                (staging / path.name).symlink_to(path.resolve())
        part["vocab_size"] = num_rows
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.rmtree(out, ignore_errors=True)
        staging.rename(out)
    except OSError as error:
        raise EnvironmentFaultError(f"{error.filename or out}: {error.strerror}; name another cache folder") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _extend_file(path: Path, out: Path, before: int, num_rows: int) -> int:
    """Number of extended tensors in the file; a file without any becomes a link."""
    try:
        with safe_open(path, framework="pt") as stream:
            names = list(stream.keys())
            named = [name for name in names if name.endswith(_NAMES)]
            extended = [name for name in named if stream.get_slice(name).get_shape()[0] == before]
            if not extended:
                out.symlink_to(path.resolve())
                return 0
            tensors = {name: stream.get_tensor(name) for name in names}
            metadata = stream.metadata()
    except SafetensorError as error:
        raise InputError(f"{path}: its safetensors weights are damaged: {error}") from error
    for name in extended:
        tensors[name] = _with_rows(tensors[name], num_rows)
    save_file(tensors, out, metadata=metadata)
    return len(extended)


def _with_rows(tensor: Tensor, num_rows: int) -> Tensor:
    rows = tensor.float()
    mean, spread = rows.mean(dim=0, keepdim=True), rows.std(dim=0, keepdim=True)
    noise = torch.randn((num_rows - len(rows), *rows.shape[1:]), generator=torch.Generator().manual_seed(_SEED))
    return torch.cat([tensor, (mean + _NOISE * spread * noise).to(tensor.dtype)])


def _run(request: ExtendVocabularyRequest) -> Lines:
    extend_vocabulary(Path(request.folder), request.num_rows, Path(request.out))
    return Lines()


if __name__ == "__main__":
    run_request_and_exit(ExtendVocabularyRequest, _run)
