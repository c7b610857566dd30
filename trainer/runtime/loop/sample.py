"""A continuation of a held-out prompt, so that a person sees what the numbers mean.

Drawn with a fixed seed, so that the same weights give the same text: the greedy choice of a young model is one token
for ever. Engines that shard weights are left out: generation would gather every parameter for each token.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.runtime.data.token_rows import TokenRows
from trainer.spec.strategy import Sharding

PROMPT_TOKENS = 32
NEW_TOKENS = 48
SEED, TEMPERATURE, TOP_K = 0, 0.8, 40


def can_sample(sharding: Sharding) -> bool:
    """True where each rank holds whole weights in a plain model."""
    return sharding in (Sharding.NONE, Sharding.DDP)


def prompt_of(rows: TokenRows) -> list[int]:
    """The first tokens of the first held-out row."""
    return [int(token) for token in rows.row(0)[:PROMPT_TOKENS]]


def continue_prompt(model: nn.Module, prompt: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the model puts after the prompt."""
    assert isinstance(model, PreTrainedModel)
    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        answer = _generate(model, ids, tokenizer)
    except (TypeError, ValueError, AttributeError, LookupError, NotImplementedError) as error:
        if not model.is_custom_code():
            raise
        return f"none: the model's own code raised {type(error).__name__}: {error}"  # no run ends for want of a sample
    finally:
        model.train(was_training)
    return str(tokenizer.decode(answer[0, len(prompt) :], skip_special_tokens=True))


def _generate(model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    with torch.no_grad(), torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
        torch.manual_seed(SEED)
        answer = model.generate(  # type: ignore[operator]  # transformers' mixin, untyped
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    assert isinstance(answer, Tensor)
    return answer
