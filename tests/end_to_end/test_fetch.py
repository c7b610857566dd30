"""`shardwise fetch` downloads enough to train without a network, and asks the hub nothing about complete files."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hub_server import COMMIT, Hub, serving
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from workplace_factory import SENTENCES, TINY_CONFIG, Workplace

NUM_FILES = 3
ROWS = [{"text": f"{SENTENCES[number % 4]} {number}"} for number in range(240)]


def weights() -> bytes:
    """model.safetensors of the tiny Llama, drawn at random."""
    width, inner = TINY_CONFIG["hidden_size"], TINY_CONFIG["intermediate_size"]
    key = width * TINY_CONFIG["num_key_value_heads"] // TINY_CONFIG["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (320, width), "norm": (width,)}
    for layer in range(TINY_CONFIG["num_hidden_layers"]):
        shapes |= {f"layers.{layer}.self_attn.{name}_proj": (width, width) for name in "qo"}
        shapes |= {f"layers.{layer}.self_attn.{name}_proj": (key, width) for name in "kv"}
        shapes |= {f"layers.{layer}.mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        shapes |= {f"layers.{layer}.mlp.down_proj": (width, inner)}
        shapes |= {f"layers.{layer}.{name}_layernorm": (width,) for name in ("input", "post_attention")}
    draw = np.random.default_rng(7)
    drawn = {name: draw.normal(0, 0.05, shape) if len(shape) > 1 else np.ones(shape) for name, shape in shapes.items()}
    return save({f"model.{name}.weight": values.astype(np.float32) for name, values in drawn.items()})


def tokenizer() -> bytes:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made.to_str().encode()


def rows_file(number: int) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS[number::NUM_FILES]).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    model = {
        "config.json": json.dumps(TINY_CONFIG).encode(),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
        ).encode(),
        "model.safetensors": weights(),
        "pytorch_model.bin": b"never fetched",
    }
    rows = {f"data/train-{number:05d}-of-0000{NUM_FILES}.jsonl": rows_file(number) for number in range(NUM_FILES)}
    with serving(Hub(files={"org/model": model, "org/rows": rows})) as served:
        yield served


@pytest.fixture
def online(workplace: Workplace, hub: Hub) -> Workplace:
    retained = {name: value for name, value in workplace.environment.items() if "PROXY" not in name.upper()}
    retained = {name: value for name, value in retained.items() if not name.startswith("HF_")}
    place = Workplace(workplace.folder, retained | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"})
    place.write_job(
        model={"name": "org/model", "config": None, "tokenizer": None},
        data={"train": "org/rows", "eval": "10%"},
        train={"steps": 2},
        checkpoint={"every": "100 steps"},
    )
    return place


def offline(place: Workplace) -> Workplace:
    """The same without a network: the hub's address leads nowhere."""
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    return Workplace(place.folder, place.environment | nowhere)


def test_after_fetch_a_job_of_the_hub_trains_without_a_network(online: Workplace, hub: Hub):
    cache = online.folder / "home" / ".cache" / "huggingface" / "hub"
    lines = online.run("fetch", "job.yaml").stdout.splitlines()
    size = sum(map(len, (rows_file(number) for number in range(NUM_FILES))))
    assert any(
        line.startswith("the weights of org/model: ") and line.endswith(f"1 file into {cache}") for line in lines
    )
    assert any("org/rows" in line and f"{size / 1024:.3g} KiB" in line and str(cache) in line for line in lines)
    assert any(line.startswith("the prepared data: prepared now, ") for line in lines)
    assert lines[-1] == "without a network: HF_HUB_OFFLINE=1 shardwise train job.yaml"
    assert not list(cache.rglob("pytorch_model.bin"))

    asked = len(hub.requests)
    lines = online.run("fetch", "job.yaml", "--no-prepare").stdout.splitlines()
    assert lines[:2] == [
        f"the weights of org/model: here already, in {cache}",
        f"the data of org/rows (data.train): here already, in {cache}",
    ]
    assert len(hub.requests) == asked

    output = offline(online).run("train", "job.yaml").stdout
    assert f"org/rows@{COMMIT}" in output


def test_a_stream_is_fetched_whole(online: Workplace, hub: Hub):
    cache = online.folder / "home" / ".cache" / "huggingface" / "hub"
    lines = online.run("fetch", "job.yaml", "data.streaming=true", "--no-prepare").stdout.splitlines()
    assert any(line.startswith("the data of org/rows") and " in 3 files into " in line for line in lines)
    assert len(list(cache.rglob("train-*.jsonl"))) == NUM_FILES


def test_a_download_that_was_broken_off_is_gone_on_with(online: Workplace, hub: Hub):
    online.run("fetch", "job.yaml", "--no-prepare")
    (broken,) = (online.folder / "home").rglob("snapshots/*/model.safetensors")
    broken.unlink()
    lines = online.run("fetch", "job.yaml", "--no-prepare").stdout.splitlines()
    assert " in 1 file into " in lines[0] and "here already" in lines[1]
    assert broken.is_file()
