"""Models with drawn weights, as folders that a job names: nothing is downloaded, and loading is the usual loading."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

from launch.model_files import read_preset

TINY: dict[str, Any] = {  # what a rehearsal makes of any of them
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


def model_config(preset: str, *, is_tiny: bool) -> dict[str, Any]:
    """The config of a preset; of a rehearsal, the same architecture in the smallest size that has all its parts."""
    config = dict(read_preset(preset))
    if is_tiny:
        config |= {key: value for key, value in TINY.items() if key in config or key == "head_dim"}
        config.pop("rope_scaling", None)
    return config


def model_folder(preset: str, root: Path, *, is_tiny: bool) -> Path:
    """The folder of a preset's model below `root`, in bf16 safetensors; made where it is not there yet."""
    folder = root / (f"{preset}-tiny" if is_tiny else preset)
    done = folder / "model.safetensors"
    if not done.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps(model_config(preset, is_tiny=is_tiny) | {"torch_dtype": "bfloat16"})
        )
        _draw_apart(folder)
    return folder


def _draw_apart(folder: Path) -> None:
    """Draws in a process that ends: one that has used a card keeps some of it, which would count as a run's."""
    import torch

    if not torch.cuda.is_available():
        draw_weights(folder)
        return
    process = multiprocessing.get_context("spawn").Process(target=draw_weights, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0, f"the weights of {folder.name} were not drawn"


def draw_weights(folder: Path, *, seed: int = 0) -> None:
    """Fills a folder that has a config.json with weights: drawn on the card where there is one, as a CPU takes minutes.

    Matrices and embeddings are normal with a deviation of 0.02, what has one dimension is 1 for a weight and 0 else.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    drawn = {}
    for name, parameter in model.named_parameters():  # tied weights stand once
        if parameter.dim() > 1:
            weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            drawn[name] = weight.normal_(0.0, 0.02, generator=generator).cpu()
        else:
            value = 1.0 if name.endswith("weight") else 0.0
            drawn[name] = torch.full(parameter.shape, value, dtype=torch.bfloat16)
    partial = folder / "model.safetensors.partial"
    save_file(drawn, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
