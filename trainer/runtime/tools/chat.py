"""Chat with the model of a run: questions from the terminal or a pipe, one a line; answers as they are generated.

    python -m shardwise.trainer.runtime.tools.chat RUN_DIR [--checkpoint best|last|step-N] [--max-new-tokens N] ...

With --turns stdin is a JSON list of texts instead: earlier questions and answers in turn, then the question. There is
one answer, and an error ends the program.

The model is the run's export, if there is one and no checkpoint is named; else a checkpoint. Adapters are applied to
their base as they were trained: for qlora it is held in 4 bit. On a GPU weights have the type that the run computed in;
on a CPU, where 16 bit is slow, that of the files.

Answers go to stdout and everything else to stderr. Ctrl-C ends an answer, which counts as given; at the prompt it ends
the program. With a chat template the whole conversation is the prompt, and its oldest turns are dropped where it
exceeds what the model reads; without one each line is continued by itself.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import torch
from jinja2 import TemplateError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.utils.logging import disable_progress_bar

from shardwise.trainer.runtime.checkpoint import import_weights
from shardwise.trainer.runtime.data.chat.template import load_chat_template
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer
from shardwise.trainer.runtime.export.folder import end_token_ids, round_weights
from shardwise.trainer.runtime.export.run import checkpoint_of, plan_on, read_plan
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.models.methods import peft_key
from shardwise.trainer.runtime.models.model_code import compute_buffers, load_model_code
from shardwise.trainer.runtime.models.outer import outer_of
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Plan

DEFAULT_TEMPERATURE = 0.7  # where neither the command line nor the generation config has one
LEAST_ANSWER_TOKENS = 16  # of room, below which old turns are dropped


class ChatModel(NamedTuple):
    """A model, its tokenizer, and what ends its answers."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    title: str  # `runs/x, step 30`
    end_ids: tuple[int, ...]
    prefix: tuple[int, ...]  # what stands before a text
    max_positions: int | None  # tokens that the model reads, prompt and answer together

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)


def load_chat_model(run_dir: Path, *, checkpoint: str | None) -> ChatModel:
    """The model and tokenizer of a run; InputError where one of them or the base is missing."""
    plan = read_plan(run_dir)
    if plan.tokenizer_path is None:
        raise InputError(f"{run_dir}: was trained on token ids without a tokenizer; there is no text to chat in")
    export = run_dir / "export"
    if checkpoint is None and export.is_dir():
        model, title, source = _exported(plan, export), f"{export}", export
    else:
        found, _ = checkpoint_of(run_dir, plan, checkpoint)
        model = _built(plan)
        import_weights(model, found)
        title, source = f"{run_dir}, step {found.step}", Path(plan.tokenizer_path)
    tokenizer = _tokenizer(source, plan)
    return ChatModel(
        model=_on_device(model, plan),
        tokenizer=tokenizer,
        title=title,
        end_ids=end_token_ids(plan, tokenizer),
        prefix=load_tokenizer(source).document_prefix,
        max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )


def _exported(plan: Plan, folder: Path) -> PreTrainedModel:
    """The model of a run's own export; adapters on the base that they were trained on."""
    if not plan.chosen.method.freezes_base:
        load_model_code(plan.model_code)  # the run's own copy, not what lies in the folder
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        assert isinstance(loaded, PreTrainedModel)
        compute_buffers(loaded, loaded.dtype, with_persistent=False)
        return loaded
    model, saved = _built(plan), load_file(folder / "adapter_model.safetensors")
    outer = outer_of(plan, (name for name, _ in model.named_parameters()))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(saved[peft_key(name if outer is None else outer.name_of(name))])
    return model


def _built(plan: Plan) -> PreTrainedModel:
    """The plan's model as it is before its first step."""
    if plan.model_path is not None and not Path(plan.model_path).is_dir():
        raise InputError(f"{plan.model_path}: the base model is not there any more; put it back")
    model = build_model(plan_on(plan, _device_kind()))
    model.config.use_cache = True
    return model


def _tokenizer(folder: Path, plan: Plan) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder with the template that the run was trained with."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    template = load_chat_template(plan.job.data.chat_template, folder)
    if template is not None:
        tokenizer.chat_template = template.source
    return tokenizer


def _on_device(model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
    model.requires_grad_(requires_grad=False).eval()
    if _device_kind() is not DeviceKind.CUDA:
        return model
    if not plan.chosen.method.freezes_base:
        round_weights(model, compute_type(plan.chosen.strategy.precision))
    try:
        moved: Any = model.to("cuda")  # type: ignore[arg-type]  # transformers' decorator hides the signature
    except torch.cuda.OutOfMemoryError as error:
        raise EnvironmentFaultError(
            "the model does not fit on this GPU; to use the CPU, set CUDA_VISIBLE_DEVICES= (nothing)"
        ) from error
    assert isinstance(moved, PreTrainedModel)
    return moved


def _device_kind() -> DeviceKind:
    return DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU


class Sampling(NamedTuple):
    """How answers are sampled; `temperature` None: by the model's generation config."""

    max_new_tokens: int
    temperature: float | None = None


class Interrupts:
    """Ctrl-C: a flag while an answer is made, KeyboardInterrupt otherwise."""

    def __init__(self) -> None:
        self.is_generating = False
        self.is_requested = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        if not self.is_generating:
            raise KeyboardInterrupt
        self.is_requested = True


class Conversation:
    """A conversation with a model; turns are added by `answer`."""

    def __init__(self, chat_model: ChatModel, sampling: Sampling, system: str | None, interrupts: Interrupts) -> None:
        if system is not None and not chat_model.has_template:
            raise InputError("--system: this tokenizer has no chat template, and so no system message; remove --system")
        self._chat_model, self._sampling, self._interrupts = chat_model, sampling, interrupts
        self._opening: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    def resume(self, texts: Sequence[str]) -> None:
        """Adds earlier turns: questions and answers in turn."""
        roles = cycle(("user", "assistant"))
        self._turns += [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]

    def answer(self, question: str, streamer: TextStreamer | None = None) -> str:
        """The model's answer, shown as it is made; InputError for a question longer than the model reads."""
        ids = self._prompt(question)
        tokenizer = self._chat_model.tokenizer
        made = self._generate(ids, streamer)
        text = str(tokenizer.decode(made, skip_special_tokens=True))
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        return text

    def _prompt(self, question: str) -> list[int]:
        """Ids of the conversation and the question, with room for an answer."""
        longest = self._chat_model.max_positions
        room = None if longest is None else longest - min(self._sampling.max_new_tokens, LEAST_ANSWER_TOKENS)
        while True:
            ids = self._ids(question)
            if room is None or len(ids) <= room:
                return ids
            if not self._turns or not self._chat_model.has_template:
                raise InputError(f"the question has {len(ids)} tokens; the model reads {room} and an answer")
            del self._turns[:2]  # a question and its answer

    def _ids(self, question: str) -> list[int]:
        tokenizer = self._chat_model.tokenizer
        if not self._chat_model.has_template:
            return [*self._chat_model.prefix, *tokenizer(question, add_special_tokens=False)["input_ids"]]
        messages = [*self._opening, *self._turns, {"role": "user", "content": question}]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            what = "--system: " if self._opening else ""
            raise InputError(f"{what}the tokenizer's chat template refuses this conversation: {error}") from error
        ids: list[int] = tokenizer(str(text), add_special_tokens=False)["input_ids"]
        return ids

    def _generate(self, prompt: list[int], streamer: TextStreamer | None) -> list[int]:
        model: Any = self._chat_model.model
        ids = torch.tensor([prompt], device=model.device)
        longest = self._chat_model.max_positions
        num_new = self._sampling.max_new_tokens if longest is None else longest - len(prompt)
        self._interrupts.is_generating, self._interrupts.is_requested = True, False
        try:
            with torch.inference_mode():
                made = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=self._settings(min(self._sampling.max_new_tokens, num_new)),
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([_Interrupted(self._interrupts)]),
                )
        except torch.cuda.OutOfMemoryError as error:
            raise EnvironmentFaultError(
                "the GPU's memory ran out; fewer turns or --max-new-tokens need less, CUDA_VISIBLE_DEVICES= none"
            ) from error
        finally:
            self._interrupts.is_generating = False
        answer: list[int] = made[0, len(prompt) :].tolist()
        return answer

    def _settings(self, num_new: int) -> GenerationConfig:
        """The model's own sampling, or the requested one."""
        own: GenerationConfig = self._chat_model.model.generation_config
        temperature = self._sampling.temperature
        sampling: dict[str, Any] = {}
        if temperature == 0:
            sampling = {"do_sample": False}
        elif temperature is not None:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": own.top_p, "top_k": own.top_k}
        elif own.do_sample:
            sampling = {"do_sample": True, "temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k}
        else:
            sampling = {"do_sample": True, "temperature": DEFAULT_TEMPERATURE}
        tokenizer, end_ids = self._chat_model.tokenizer, list(self._chat_model.end_ids)
        pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return GenerationConfig(
            **{name: each for name, each in sampling.items() if each is not None},
            max_new_tokens=num_new,
            eos_token_id=end_ids or None,
            pad_token_id=pad_id,
        )


class _Interrupted(StoppingCriteria):
    """Ends an answer after Ctrl-C."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __call__(self, input_ids: Tensor, _scores: Tensor, **_: Any) -> Tensor:  # noqa: ANN401  # theirs
        return torch.full((input_ids.shape[0],), self._interrupts.is_requested, device=input_ids.device)


def answer_all(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, questions: Iterator[str]) -> None:
    """Answers each question on stdout; an error is printed, and the next question answered."""
    for question in questions:
        if not question.strip():
            continue
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            conversation.answer(question, streamer)
        except InputError as error:
            _print(f"shardwise: {error}")


def _questions() -> Iterator[str]:
    """Lines of a pipe as they are; at a terminal, behind a prompt and with a line editor."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    import readline  # noqa: F401  # input() uses it once it is here

    while True:
        try:
            yield input("> ")
        except EOFError:
            _print("")
            return


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # this program's interface


def _opening_line(chat_model: ChatModel) -> str:
    how = (
        "by the tokenizer's chat template"
        if chat_model.has_template
        else "without a chat template, which this tokenizer lacks: each line is continued as plain text"
    )
    ends = "; Ctrl-C ends an answer, Ctrl-D the program" if sys.stdin.isatty() else ""
    return f"{chat_model.title} on {chat_model.model.device}, {how}{ends}"


def main() -> None:
    """Parses the command line and talks; ends with the error's exit code, or 130 for Ctrl-C at the prompt."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.trainer.runtime.tools.chat", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--checkpoint")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--system")
    parser.add_argument("--turns", action="store_true")
    chosen = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as in export_run
    disable_progress_bar()
    sys.exit(int(_ended(lambda: _run(chosen))))


def _run(chosen: argparse.Namespace) -> None:
    interrupts = Interrupts()
    chat_model = load_chat_model(chosen.run_dir, checkpoint=chosen.checkpoint)
    conversation = Conversation(
        chat_model, Sampling(chosen.max_new_tokens, chosen.temperature), chosen.system, interrupts
    )
    _print(_opening_line(chat_model))
    if chosen.turns:
        *earlier, question = msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
        conversation.resume(earlier)
        conversation.answer(question, TextStreamer(chat_model.tokenizer, skip_prompt=True, skip_special_tokens=True))
        return
    answer_all(conversation, chat_model.tokenizer, _questions())


def _ended(work: Callable[[], None]) -> ExitCode:
    try:
        work()
    except ShardwiseError as error:
        _print(f"shardwise: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program ends already
        _print("")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.DONE


if __name__ == "__main__":
    main()
