"""Text to token ids: a Hugging Face tokenizer folder, or a byte-level BPE trained on the data and saved as one.

The `tokenizers` library, on which transformers' fast tokenizers are built, uses all cores and is imported in
milliseconds. transformers is imported only to convert a folder without tokenizer.json.

A document is [bos] + ids + eos: eos always, as the boundary that packing needs; bos where the tokenizer itself puts one
before a text (Llama does, GPT-2 and Qwen do not).
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_SETTINGS = "tokenizer_config.json"
_NOT_TOKENIZER = (
    "config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)  # fmt: skip


class TextTokenizer(NamedTuple):
    """A tokenizer with the ids that stand around a document."""

    tokenizer: Tokenizer
    eos_id: int
    pad_id: int
    document_prefix: tuple[int, ...]  # bos, or nothing

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without anything around them."""
        with tokenizer_panics():
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@contextmanager
def tokenizer_panics() -> Iterator[None]:
    """InputError in place of a panic of the tokenizers library, as of a pattern that never ends on some text."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a BaseException, which the library does not export
            raise
        raise InputError(f"model.tokenizer: cannot cut a text of the data: {error}; use another tokenizer") from error


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> TextTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; the same texts in the same order give the same one."""
    if vocab_size < NUM_BYTES + 1:
        raise InputError(
            f"model.tokenizer: train: a vocabulary of {vocab_size} is too small; "
            f"a byte-level BPE needs {NUM_BYTES + 1}, one for each byte and one for the end of a text"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    assert end_id is not None
    return TextTokenizer(tokenizer, eos_id=end_id, pad_id=end_id, document_prefix=())


def write_trained_tokenizer(trained: TextTokenizer, folder: Path) -> None:
    """Writes the files that AutoTokenizer.from_pretrained reads."""
    folder.mkdir(parents=True)
    _write_tokenizer_json(trained, folder)
    named = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **named,
    }
    for name, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", named)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a folder; InputError if there is none, or none that ends a text."""
    if (folder / "tokenizer.json").is_file():
        tokenizer = _parsed(folder / "tokenizer.json")
        settings = _settings_of(folder)
    else:
        tokenizer, settings = _converted(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eos_id = _token_id(tokenizer, settings, "eos_token")
    if eos_id is None:
        raise InputError(
            f"model.tokenizer: {folder} does not name the token that ends a text;\n"
            'add "eos_token" to its tokenizer_config.json'
        )
    pad_id = _token_id(tokenizer, settings, "pad_token")
    bos_id = _token_id(tokenizer, settings, "bos_token")
    starts_with_bos = bos_id is not None and tokenizer.encode("").ids[:1] == [bos_id]
    prefix = (bos_id,) if bos_id is not None and starts_with_bos else ()
    return TextTokenizer(tokenizer, eos_id, eos_id if pad_id is None else pad_id, prefix)


def add_special_tokens(loaded: TextTokenizer, tokens: Sequence[str], folder: Path) -> None:
    """Adds special tokens to the tokenizer, and writes its tokenizer.json into `folder`."""
    loaded.tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    _write_tokenizer_json(loaded, folder)


def copy_tokenizer(loaded: TextTokenizer, source: Path, folder: Path) -> None:
    """Copies the tokenizer's files out of `source`; writes tokenizer.json where `source` has none.

    The copy names no code of its own (`auto_map`): tokenizer.json replaces it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in _tokenizer_files(source):
        shutil.copyfile(path, folder / path.name)
    settings_path = folder / _SETTINGS
    if settings_path.is_file() and _has_code(settings := json.loads(settings_path.read_bytes())):
        plain = {name: value for name, value in settings.items() if name != "auto_map"}
        plain["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings_path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    if not (folder / "tokenizer.json").exists():
        _write_tokenizer_json(loaded, folder)


def _write_tokenizer_json(tokenizer: TextTokenizer, folder: Path) -> None:
    """As `Tokenizer.save`, which raises a plain Exception on a full disk."""
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer.to_str(pretty=True), encoding="utf-8")


def tokenizer_digest(folder: Path) -> bytes:
    """Digest of all files in `folder` from which ids follow."""
    digest = blake2b(digest_size=32)
    for path in _tokenizer_files(folder):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise EnvironmentFaultError(f"{path}: cannot be read: {error.strerror}") from error
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.digest()


def named_tokens(folder: Path) -> dict[str, str]:
    """The folder's bos_token, eos_token and so on, as its chat template receives them."""
    settings = _settings_of(folder)
    extra = settings.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **settings}
    tokens = {name: _content(entry) for name, entry in named.items() if name.endswith("_token")}
    return {name: content for name, content in tokens.items() if isinstance(content, str)}


def special_tokens(tokenizer: TextTokenizer) -> tuple[str, ...]:
    """The texts of the special tokens, eos among them."""
    added = tokenizer.tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    eos = tokenizer.tokenizer.id_to_token(tokenizer.eos_id)
    return tuple(dict.fromkeys(special if eos is None else [*special, eos]))


def _tokenizer_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"model.tokenizer: {folder} is not a folder")
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in _SUFFIXES and path.name not in _NOT_TOKENIZER and path.is_file()
    ]


def _parsed(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # the library raises plain Exception for a file it cannot parse
        raise InputError(f"{path}: is not a tokenizer that the tokenizers library reads: {error}") from error


def _settings_of(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; both may be missing."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", _SETTINGS):
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise InputError(f"{path}: is no JSON object")
        settings |= {key: entry for key, entry in content.items() if entry is not None}
    return settings


def _converted(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """A folder of another layout (vocab.json and merges.txt, a sentencepiece model) through transformers."""
    from transformers import AutoTokenizer  # slow, and rarely needed

    if _has_code(_settings_of(folder)):
        raise InputError(
            f"model.tokenizer: {folder} has code of its own, which is not run; name a folder with a tokenizer.json"
        )
    try:
        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"model.tokenizer: {folder} holds no tokenizer: {first_line}") from error
    backend = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"model.tokenizer: {folder} holds a {type(slow).__name__}, which has no fast form; tokenizer.json is needed"
        )
    named = {name: getattr(slow, name) for name in ("eos_token", "pad_token", "bos_token")}
    return Tokenizer.from_str(backend.to_str()), named


def _has_code(settings: dict[str, Any]) -> bool:
    """True if tokenizer_config.json names a class from the folder's own code."""
    classes = settings.get("auto_map")
    return isinstance(classes, dict) and "AutoTokenizer" in classes


def _token_id(tokenizer: Tokenizer, settings: dict[str, Any], name: str) -> int | None:
    content = _content(settings.get(name))
    return tokenizer.token_to_id(content) if isinstance(content, str) else None


def _content(entry: Any) -> Any:  # noqa: ANN401 - any JSON
    """The text of a token, which is written as it is or as an object with its properties."""
    return entry.get("content") if isinstance(entry, dict) else entry
