"""Which tokens end an answer, so that an exported model stops where it was taught to.

Three places know one: the base model's generation settings, the tokenizer (its end of text), and the chat template,
which closes the assistant's turn with a token of its own (`<|eot_id|>` of Llama 3, `<|im_end|>` of ChatML). Whoever
generates needs all of them; a model that lacks the last one answers, and then goes on as the user.
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trainer.spec.plan import Plan

_ANSWER = "An answer."  # stands in for the assistant's words in a template
_TALK = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": _ANSWER}]


def end_token_ids(plan: Plan, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Ids that end an answer of a plan's model, the base's own first; nothing where nobody knows one."""
    is_own = plan.model_path is not None and plan.job.model.tokenizer is None  # another tokenizer has other ids
    ids = [*_base_ids(Path(plan.model_path))] if is_own and plan.model_path is not None else []
    if tokenizer is not None:
        ids += [each for each in (tokenizer.eos_token_id, end_of_turn_id(tokenizer)) if isinstance(each, int)]
    return tuple(dict.fromkeys(ids))


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token by which the chat template ends the assistant's turn; None where it uses plain text, or there is none.

    Found by what stands behind an answer. A template that refuses this conversation has told nothing.
    """
    if not tokenizer.chat_template:
        return None
    try:
        text = tokenizer.apply_chat_template(_TALK, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):
        return None
    _, _, tail = str(text).rpartition(_ANSWER)
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def write_generation_ids(
    folder: Path, end_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase, *, is_new: bool
) -> None:
    """Puts the ids into the generation_config.json that transformers wrote; what else stands there stays.

    Into config.json too where the model is new: there stand defaults of its class, which are other tokens here. By
    hand: transformers refuses to save settings that it has loaded and that were changed since, where a base's own
    contradict each other (a temperature beside greedy decoding), as some do.
    """
    own: dict[str, Any] = {
        "eos_token_id": end_ids[0] if len(end_ids) == 1 else list(end_ids),
        "pad_token_id": tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    for name in ("generation_config.json", *(("config.json",) if is_new else ())):
        path = folder / name
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        stays = () if is_new else ("pad_token_id", "bos_token_id")
        kept: dict[str, Any] = {key: settings[key] for key in stays if key in settings}
        settings = {**{key: each for key, each in settings.items() if key not in own}, **own, **kept}
        known = {key: each for key, each in settings.items() if key not in own or each not in (None, [])}
        path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _base_ids(folder: Path) -> list[int]:
    """What the base's files name, generation settings before its config; not the default of its class."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        settings = json.loads(path.read_text(encoding="utf-8"))
        found = settings.get("eos_token_id", (settings.get("text_config") or {}).get("eos_token_id"))
        if found is not None:
            return [int(each) for each in (found if isinstance(found, list) else [found])]
    return []
