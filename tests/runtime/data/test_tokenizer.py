"""Tokenizers: made from text, taken from a folder, and in both cases what transformers would make of the same text."""

import json

import pytest
from prepare_request_factory import numbered_text
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from shardwise.trainer.runtime.data.tokenizer import (
    END_OF_TEXT,
    copy_tokenizer,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
    write_trained_tokenizer,
)
from shardwise.trainer.spec.errors import InputError

TEXTS = [numbered_text(50), numbered_text(40, word="line"), "def f(x):\n\n    return  x + 1\n"]
SAMPLES = ["row 7 of 50", "def  f(x):\n\n    \treturn x\r\n", "é 日本語 \U0001f600 \x00", " leading", ""]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(iter(TEXTS), vocab_size=400)


@pytest.fixture
def folder(trained, tmp_path):
    write_trained_tokenizer(trained, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_the_vocabulary_is_as_large_as_asked_has_every_byte_and_ends_texts(trained):
    assert trained.vocab_size == 400
    assert trained.tokenizer.id_to_token(trained.eos_id) == END_OF_TEXT
    assert trained.document_prefix == ()
    assert train_tokenizer(iter(TEXTS), vocab_size=400).tokenizer.to_str() == trained.tokenizer.to_str()
    assert 257 <= train_tokenizer(iter(["ab ab"]), vocab_size=5000).vocab_size < 270
    with pytest.raises(InputError, match=r"\b256\b.*\b257\b"):
        train_tokenizer(iter(TEXTS), vocab_size=256)


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "mistral", "gpt2"])
def test_transformers_loads_what_was_made_and_gives_the_same_ids(trained, folder, model_type):
    """Also with a model's config.json, as in an exported folder, which may select another class."""
    from transformers import AutoTokenizer

    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = AutoTokenizer.from_pretrained(folder)
    assert len(loaded) == trained.vocab_size
    assert (loaded.eos_token_id, loaded.pad_token_id) == (trained.eos_id, trained.pad_id)
    assert load_tokenizer(folder)[1:] == trained[1:]
    assert load_tokenizer(folder).encode(SAMPLES) == trained.encode(SAMPLES)
    for sample in SAMPLES:
        ids = loaded(sample)["input_ids"]
        assert [ids] == trained.encode([sample])
        assert loaded.decode(ids) == sample


def llama_like(folder, *, eos="</s>", puts_bos=True):
    """A tokenizer that puts bos before a text, truncates and pads, as saved ones do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False)
    )
    if puts_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": eos, "pad_token": "<pad>", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_bos_stands_before_a_document_where_the_tokenizer_puts_it(tmp_path):
    for name, puts_bos, prefix in (("with", True, (0,)), ("without", False, ())):
        loaded = load_tokenizer(llama_like(tmp_path / name, puts_bos=puts_bos))
        assert (loaded.document_prefix, loaded.eos_id, loaded.pad_id) == (prefix, 1, 2)
        short, long = loaded.encode(["r", TEXTS[0]])
        assert len(short) == 1 and len(long) > 100, "saved truncation and padding do not touch documents"


def test_a_folder_of_vocabulary_and_merges_is_converted(trained, tmp_path):
    slow = tmp_path / "slow"
    slow.mkdir()
    trained.tokenizer.model.save(str(slow))
    (slow / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": END_OF_TEXT, "add_prefix_space": False})
    )
    copy_tokenizer(load_tokenizer(slow), slow, tmp_path / "copy")
    for folder in (slow, tmp_path / "copy"):
        assert load_tokenizer(folder).encode(SAMPLES[:2]) == trained.encode(SAMPLES[:2])


def test_a_folder_without_a_tokenizer_or_the_token_that_ends_texts_is_an_input_error(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(folder)
    with pytest.raises(InputError, match='add "eos_token"'):
        load_tokenizer(llama_like(folder / "t", eos=None))


def test_a_copy_leaves_weights_and_model_settings_behind(trained, folder, tmp_path):
    for name in ("model.safetensors", "config.json", "generation_config.json", "model.safetensors.index.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    copy_tokenizer(trained, folder, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "chat_template.jinja", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_a_digest_changes_with_the_tokenizer_and_not_with_the_weights(folder):
    before = tokenizer_digest(folder)
    (folder / "model.safetensors").write_text("weights")
    assert tokenizer_digest(folder) == before
    change_settings(folder, bos_token=END_OF_TEXT)
    assert tokenizer_digest(folder) != before
    with pytest.raises(InputError, match="is not a folder"):
        tokenizer_digest(folder / "none")


def change_settings(folder, **changes):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))


def test_a_copy_of_a_tokenizer_with_code_of_its_own_needs_none_and_code_alone_is_refused(folder, tmp_path):
    from transformers import AutoTokenizer

    named = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    change_settings(folder, auto_map=named, tokenizer_class="OwnTokenizer")
    loaded = load_tokenizer(folder)
    copy_tokenizer(loaded, folder, tmp_path / "copy")
    exported = AutoTokenizer.from_pretrained(tmp_path / "copy", trust_remote_code=False)
    assert exported(SAMPLES)["input_ids"] == loaded.encode(SAMPLES)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"code of its own, .*tokenizer\.json"):
        load_tokenizer(folder)
