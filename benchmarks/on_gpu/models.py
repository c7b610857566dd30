"""Models with random weights, as folders for a job: nothing is downloaded, and they load like any model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardwise.launch.inputs.model_files import read_preset

SMALL = "llama-160m"
_PATH = (Path(__file__).resolve().parents[1], Path(__file__).resolve().parents[2])  # benchmarks/ and the repository
OWN: dict[str, dict[str, Any]] = {
    SMALL: {  # fp32 states of 2.5 GiB under AdamW; every dimension is a multiple of 128, as FP8 requires
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
    }
}
TINY: dict[str, Any] = {  # the sizes in a rehearsal
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
}


def model_config(name: str, *, is_tiny: bool) -> dict[str, Any]:
    """The config of a model; in a rehearsal, the same architecture in the smallest complete size."""
    config = dict(OWN.get(name) or read_preset(name))
    if is_tiny:
        config |= {key: value for key, value in TINY.items() if key in config or key == "head_dim"}
        config.pop("rope_scaling", None)
    return config


def model_folder(name: str, root: Path, *, is_tiny: bool) -> Path:
    """The folder of a model below `root`: bf16 safetensors and a tokenizer. It is created if it does not exist.

    A separate process creates it: this one never loads torch, and uses no memory of the card.
    """
    folder = root / (f"{name}-tiny" if is_tiny else name)
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        config = model_config(name, is_tiny=is_tiny)
        (partial / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
        path = os.pathsep.join(filter(None, (*map(str, _PATH), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "on_gpu.models", str(partial.absolute())]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
        partial.rename(folder)
    return folder


def write_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """A tokenizer of one word per token: `t17` is token 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_weights(folder: Path, *, seed: int = 0) -> None:
    """Writes model.safetensors next to a config.json: matrices normal with a deviation of 0.02, norms 1, biases 0.

    They are created on the card if there is one: 8 billion need minutes on a CPU.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weights = {}
    for name, parameter in model.named_parameters():  # tied weights are listed once
        if parameter.dim() > 1:
            weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            weights[name] = weight.normal_(0.0, 0.02, generator=generator).cpu()
        else:
            value = 1.0 if name.endswith("weight") else 0.0
            weights[name] = torch.full(parameter.shape, value, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}))  # TRL needs it


if __name__ == "__main__":
    made = Path(sys.argv[1])
    write_tokenizer(made, vocab_size=int(json.loads((made / "config.json").read_text())["vocab_size"]))
    write_weights(made)
