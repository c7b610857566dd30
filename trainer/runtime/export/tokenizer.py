"""Writes the tokenizer of an export, and makes sure that transformers makes the same ids with it as the run was fed.

The files are those that the data was prepared with. That alone is not enough: beside the config.json of some model
types transformers takes only the vocabulary from tokenizer.json, and the rules by which text is cut from a class of its
own (docs/workarounds.md, W9). A model would then be asked in another language than it was taught, without a word. So
the folder is loaded as its user will load it, and compared.
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.runtime.data.tokenizer import TextTokenizer, copy_tokenizer, load_tokenizer

_TEXTS = (
    "The 2 quick foxes don't jump over 1,234,567 lazy dogs.",
    "def f(x):\n\n    \treturn  x + 1  # why?\r\n\r\n",
    "  two before, two after  ",
    "na\u00efve caf\u00e9 and cafe\u0301, \u65e5\u672c\u8a9e",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0639\u0631\u0628\u0649 \U0001f600\u200d",
)
_NUM_TOKENS = 4096  # of the vocabulary, each tried as a text; more find nothing new and take seconds


def export_tokenizer(source: Path, folder: Path) -> str | None:
    """Writes the tokenizer of `source` beside the config.json in `folder`; a sentence where its ids would differ."""
    trained_with = load_tokenizer(source)
    copy_tokenizer(trained_with, source, folder)
    difference = _first_difference(trained_with, folder, _texts(trained_with))
    if difference is None:
        return None
    return f"the exported tokenizer does not give the same ids as the one trained with: {difference}"


def _texts(tokenizer: TextTokenizer) -> list[str]:
    """Some sentences, and tokens from all over the vocabulary, whatever spaces, line ends and scripts are in them."""
    vocab_size = tokenizer.vocab_size
    some = range(0, vocab_size, -(-vocab_size // _NUM_TOKENS))
    return [*_TEXTS, *(f"a{token} {token}1" for token in tokenizer.tokenizer.decode_batch([[id_] for id_ in some]))]


def _first_difference(trained_with: TextTokenizer, folder: Path, texts: Sequence[str]) -> str | None:
    """What is different about the first text that becomes other ids in `folder`; None where all are the same."""
    try:
        exported = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        return f"transformers cannot load it: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
    assert isinstance(exported, PreTrainedTokenizerBase)
    found = exported(list(texts), add_special_tokens=False)["input_ids"]
    for text, ours, theirs in zip(texts, trained_with.encode(texts), found, strict=True):
        if list(theirs) != ours:
            pairs = enumerate(zip(ours, theirs, strict=False))  # one may end before they differ
            same = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
            shown = [str(list(ids)[same : same + 3]) for ids in (ours, theirs)]
            return f"{text!r}, token {same}: {shown[0]} was trained with, {type(exported).__name__} gives {shown[1]}"
    return None
