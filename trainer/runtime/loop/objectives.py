"""The objective of a plan as it is trained and as it is scored on the held-out rows; DPO with its reference; a sample.

Scores are means over all held-out rows, each counted once, for any number of ranks. The forward is that of training,
through all wrappers of the model: the same types, the same FP8 products. Tokens are scored by `TokenScore`, pairs by
the objective that they are trained with (`dpo`).

The text is sampled with a fixed seed, so that the same weights give the same text. Greedy decoding would repeat one
token early in training. Engines that shard weights generate no sample: they would gather all weights for each token.

Direct preference optimisation is Rafailov et al. 2023 (arXiv:2305.18290, equation 7) with the sigmoid loss. For a pair,
the model and a reference give the log-probability of each response given the prompt: the sum over its tokens. The
reward of a response is beta times the difference of the two, and the loss of a pair is -log sigmoid(reward of the
chosen - reward of the rejected); its mean is over the pairs of the global batch.

A micro batch of P pairs is 2 P rows, all chosen ones before all rejected ones. Dummies, which fill a last round, come
last in each half and do not count. Dropout is off, as in the authors' code: the rewards compare two models, not two
masks. That of adapters stays, as the job sets it by name; the reference has none.

    lora, qlora    the reference is the model itself with its adapters switched off, inside each step: one more forward
    full, galore   it is the model as it was before step 1: every row is run once, then the numbers are looked up

The numbers are in `reference.safetensors` in the run directory, 16 bytes a row, because a resumed run cannot compute
them again with changed weights. A row is identified by a hash of its tokens and of which of them are learned, not by
its padding, its place in the data, or the engine. `fingerprint` in the file's metadata is of the data and of the
initial weights. Every row of both splits is run, also if the run has fewer steps.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.trainer.runtime.checkpoint import Ranks, base_fingerprint
from shardwise.trainer.runtime.checkpoint.ranks import on_first
from shardwise.trainer.runtime.data.batches import MicroBatch, eval_micro_batches
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.loop.step import BalancedTokenLoss, Means, Objective, Sums, Terms, TokenLoss, forward
from shardwise.trainer.runtime.loss import IGNORED, LossOutput
from shardwise.trainer.runtime.memory.compilation import without_compilation
from shardwise.trainer.runtime.memory.host_embedding import device_of_head
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.models.methods import adapters_off
from shardwise.trainer.runtime.models.model_code import is_custom_code
from shardwise.trainer.runtime.models.router_loss import RouterLoss
from shardwise.trainer.runtime.run.extension import Hooks
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.objectives import OBJECTIVES
from shardwise.trainer.spec.data.shapes import objective_of
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job import sections as job
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.messages.rank_files import REFERENCE_PHASE
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Evaluation
from shardwise.trainer.spec.strategy import LossHead
from shardwise.trainer.spec.value import complete

if TYPE_CHECKING:
    from shardwise.trainer.runtime.loop.session import Session


class TokenScore(NamedTuple):
    """The loss of each target, and whether it is the most likely token."""

    figures: tuple[str, ...] = ("accuracy",)

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        loss, num_correct = forward(model, micro_batch, device, output=LossOutput.SCORE)
        return Terms(loss, micro_batch.num_targets, micro_batch.num_targets, (num_correct,))


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    rows: TokenRows,
    plan: Plan,
    *,
    step: int,
    objective: Objective = TokenScore(),  # noqa: B008  # it never changes
) -> Evaluation:
    """Runs every held-out row once, spread over the ranks."""
    sums = Sums(objective, accelerator.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for micro_batch in eval_micro_batches(
            rows,
            rank=accelerator.process_index,
            num_ranks=accelerator.num_processes,
            micro_batch=plan.chosen.micro_batch,
        ):
            sums.add(objective(model, micro_batch, accelerator.device))
    model.train(was_training)
    running_engine(model).release_gathered(model)
    means = sums.means()
    return _of_pairs(means, step) if "reward_margin" in means.figures else _of_tokens(means, step, plan)


def evaluations_without_gain(evaluations: Sequence[Evaluation]) -> int:
    """How many of the last evaluations have no lower loss than the best before them; one without a number has none."""
    best, count = math.inf, 0
    for evaluation in evaluations:
        count = 0 if evaluation.loss < best else count + 1
        best = min(best, evaluation.loss) if not math.isnan(evaluation.loss) else best
    return count


def _of_tokens(means: Means, step: int, plan: Plan) -> Evaluation:
    return Evaluation(
        step=step,
        loss=means.loss,
        perplexity=_perplexity(means.loss),
        num_tokens=means.num_targets,
        unigram_entropy_nats=plan.data.eval_unigram_entropy_nats,
        accuracy=means.figures["accuracy"],
    )


def _of_pairs(means: Means, step: int) -> Evaluation:
    """The perplexity is that of the chosen answers: the loss of a pair has none."""
    figures = means.figures
    return Evaluation(
        step=step,
        loss=means.loss,
        perplexity=_perplexity(-figures["logps_chosen"] / figures["tokens_chosen"]),
        num_tokens=means.num_targets,
        reward_accuracy=figures["reward_accuracy"],
        reward_margin=figures["reward_margin"],
    )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # exp(700) is near the largest float


PROMPT_TOKENS = 32
NEW_TOKENS = 48
SEED, TEMPERATURE, TOP_K = 0, 0.8, 40


def can_sample(sharding: Sharding) -> bool:
    """True where each rank holds whole weights in a plain model."""
    return sharding.is_replicated


def prompt_of(rows: TokenRows) -> list[int]:
    """The first tokens of the first held-out row."""
    return [int(token) for token in rows.row(0)[:PROMPT_TOKENS]]


def continue_prompt(model: nn.Module, prompt: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the model puts after the prompt."""
    assert isinstance(model, PreTrainedModel)
    was_training = model.training
    model.eval()
    try:
        with device_of_head(model) as device:
            output = _generate(model, torch.tensor([prompt], device=device), tokenizer)
    except (TypeError, ValueError, AttributeError, LookupError, NotImplementedError) as error:
        if not is_custom_code(model):
            raise
        return f"none: the model's own code raised {type(error).__name__}: {error}"  # no run ends for want of a sample
    finally:
        model.train(was_training)
    return str(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True))


def _generate(model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    devices = [ids.device] if ids.is_cuda else []
    with without_compilation(model), torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(SEED)
        output = model.generate(  # type: ignore[operator]  # transformers' mixin, untyped
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    assert isinstance(output, Tensor)
    return output


Reference = Callable[[nn.Module, MicroBatch, torch.device], Tensor]  # log-probabilities [2 P] in float64, no gradient


class DpoLoss(NamedTuple):
    """The objective: pairs, against a reference."""

    beta: float
    reference: Reference
    figures: tuple[str, ...] = (
        "reward_margin",
        "reward_accuracy",  # share of the pairs whose chosen response has the higher reward
        "reward_chosen",
        "reward_rejected",
        "logps_chosen",
        "logps_rejected",
        "tokens_chosen",  # targets
    )

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        reference = self.reference(model, micro_batch, device)  # first: it saves nothing for the backward
        policy = forward(model, micro_batch, device, output=LossOutput.ROWS)
        pairs = _Pairs(policy.view(2, -1), reference.view(2, -1), micro_batch.num_pairs, self.beta)
        tokens_chosen = (micro_batch.labels[: len(policy) // 2] != IGNORED).sum().to(device)
        figures = (*pairs.figures(), tokens_chosen)
        return Terms(pairs.loss(), micro_batch.num_pairs, micro_batch.num_targets, figures)


class _Pairs(NamedTuple):
    """Log-probabilities of chosen and rejected responses [2, P]; from pair `num_pairs` on they are dummies."""

    policy: Tensor
    reference: Tensor
    num_pairs: int
    beta: float

    def loss(self) -> Tensor:
        """Summed over the pairs, a scalar in fp32."""
        chosen, rejected = self._rewards()
        return -functional.logsigmoid(chosen - rejected).sum().float()

    def figures(self) -> tuple[Tensor, ...]:
        """Sums over the pairs, in the order of the objective's names."""
        chosen, rejected = (reward.detach() for reward in self._rewards())
        margin = chosen - rejected
        logps = self.policy.detach()[:, : self.num_pairs].sum(1)
        return (margin.sum(), (margin > 0).sum(), chosen.sum(), rejected.sum(), *logps)

    def _rewards(self) -> tuple[Tensor, Tensor]:
        """[num_pairs] each."""
        chosen, rejected = self.beta * (self.policy - self.reference)[:, : self.num_pairs]
        return chosen, rejected


def turn_dropout_off(model: nn.Module) -> None:
    """No dropout of the model's own in training either; that of adapters stays as it is."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." not in name:
            module.p = 0.0
        for setting in [setting for setting, value in vars(module).items() if isinstance(value, float)]:
            if "drop" in setting and not isinstance(module, nn.Dropout):
                setattr(module, setting, 0.0)  # attention_dropout, hidden_dropout, attn_pdrop, ...


REFERENCE_NAME = "reference.safetensors"
_FORMAT = "1"


def plain_base(model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """Log-probabilities [B] of a model's rows with its adapters switched off; through the engine, which may gather."""
    with adapters_off(model):
        return as_it_is(model, micro_batch, device)


def as_it_is(model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """Log-probabilities [B] of a model's rows, without dropout or gradient."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = forward(model, micro_batch, device, output=LossOutput.ROWS)
    model.train(was_training)
    return found


def no_reference(_model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """Zeros [B], for steps whose time or memory is measured: theirs are those of looking the numbers up."""
    return torch.zeros(len(micro_batch.labels), dtype=torch.float64, device=device)


class RowLogps:
    """Log-probabilities by row; a reference for DPO."""

    def __init__(self, keys: NDArray[np.uint64], logps: NDArray[np.float64]) -> None:
        self.keys, places = np.unique(keys, return_index=True)  # ascending
        self.logps = logps[places]

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Tensor:
        """Those of a micro batch, [B]; 0 for a row without a target."""
        keys = row_keys(micro_batch)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        has_target = keys != 0
        if (self.keys[places] != keys)[has_target].any():
            raise EnvironmentFaultError(
                f"{REFERENCE_NAME}: does not hold every row of this step; the data has changed since it was written: "
                "undo the change, or start a new run without --resume"
            )
        found = torch.from_numpy(np.where(has_target, self.logps[places], 0.0))
        return found.to(device, non_blocking=True)


def row_keys(micro_batch: MicroBatch) -> NDArray[np.uint64]:
    """Hashes [B] of the rows up to their last target; 0 for a row without one."""
    keys = np.zeros(len(micro_batch.labels), np.uint64)
    for place, (ids, labels) in enumerate(zip(micro_batch.input_ids.numpy(), micro_batch.labels.numpy(), strict=True)):
        targets = np.flatnonzero(labels[1:] != IGNORED)
        if len(targets):
            end = targets[-1] + 2
            digest = hashlib.blake2b(ids[:end].tobytes(), digest_size=8)
            digest.update(labels[:end].tobytes())
            keys[place] = int.from_bytes(digest.digest(), "little") or 1
    return keys


def logps_of_rows(
    model: nn.Module,
    micro_batches: Iterable[MicroBatch],
    device: torch.device,
    ranks: Ranks,
    *,
    goes_on: Callable[[], bool] = lambda: True,
) -> RowLogps | None:
    """Log-probabilities of all rows, on every rank; each rank runs its own micro batches, as many as the others.

    Collective. None if `goes_on`, called before each micro batch, returned False. InputError for a log-probability
    that is not finite.
    """
    keys, logps = [], []
    for micro_batch in micro_batches:
        if not goes_on():
            return None
        keys.append(row_keys(micro_batch))
        logps.append(as_it_is(model, micro_batch, device).cpu().numpy())
    own_keys, own_logps = np.concatenate(keys), np.concatenate(logps)
    is_row = own_keys != 0
    all_keys = b"".join(ranks.exchange(own_keys[is_row].tobytes()))
    all_logps = b"".join(ranks.exchange(own_logps[is_row].tobytes()))
    table = RowLogps(np.frombuffer(all_keys, np.uint64), np.frombuffer(all_logps, np.float64))
    if not np.isfinite(table.logps).all():
        raise InputError("train.objective: dpo: the model to start from gives rows a log-probability that is no number")
    return table


def reference_fingerprint(plan: Plan) -> str:
    """Of the data and of the weights to start from."""
    return hashlib.sha256(f"{plan.data.fingerprint} {base_fingerprint(plan)}".encode()).hexdigest()[:32]


def write_reference(path: Path, table: RowLogps, *, fingerprint: str, ranks: Ranks) -> None:
    """Writes the table on rank 0, whole or not at all."""

    def write() -> bytes:
        metadata = {"format": _FORMAT, "fingerprint": fingerprint}
        codec.write_bytes(path, save({"keys": table.keys, "logps": table.logps}, metadata))
        return b""

    on_first(ranks, write, doing="the reference's log-probabilities were not saved")


def read_reference(path: Path, *, fingerprint: str, ranks: Ranks) -> RowLogps | None:
    """The table in a file that rank 0 reads for all; None where there is none.

    InputError where it is of other data or other weights, or damaged.
    """

    def read() -> bytes:
        return path.read_bytes() if path.exists() else b""

    content = on_first(ranks, read, doing="the reference's log-probabilities cannot be read")
    if not content:
        return None
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        found, table = header["__metadata__"]["fingerprint"], RowLogps(tensors["keys"], tensors["logps"])
    except (SafetensorError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path}: is damaged ({error}); start a new run without --resume") from error
    if found != fingerprint:
        raise InputError(
            f"{path}: was made from other data or another model (fingerprint {found[:12]}, this job has "
            f"{fingerprint[:12]});\nundo the change, or start a new run without --resume"
        )
    return table


class UserLoss(NamedTuple):
    """The loss of the user's extensions file, summed over the targets of a micro batch; scored by cross entropy."""

    hooks: Hooks
    figures: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        logits = forward(model, micro_batch, device, output=LossOutput.LOGITS)
        loss = self.hooks.call(Hook.LOSS, logits, micro_batch.labels.to(device))
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise InputError("extensions: loss must return one number with a gradient: a tensor without dimensions")
        return Terms(loss, micro_batch.num_targets, micro_batch.num_targets)


class Objectives(NamedTuple):
    """Of training, and of evaluation."""

    train: Objective
    score: Objective


def build_objectives(session: "Session", wants_stop: Callable[[], bool]) -> Objectives | None:
    """Objectives of the plan; built before the first step, as a reference may need the initial weights.

    None where a stop was wanted meanwhile. InputError where a loss head cannot, EnvironmentFaultError where a resumed
    run has no reference.
    """
    return _BUILDERS[objective_of(session.plan.job.train.objective, session.plan.data.format)](session, wants_stop)


def _of_token_losses(session: "Session", _wants_stop: Callable[[], bool]) -> Objectives:
    if session.hooks is not None and session.hooks.has(Hook.LOSS):
        return Objectives(UserLoss(session.hooks), TokenScore())
    coefficient = session.plan.job.train.router_aux_loss
    if coefficient is None:
        return Objectives(TokenLoss(), TokenScore())
    return Objectives(BalancedTokenLoss(RouterLoss(plain_model(session.model)), coefficient), TokenScore())


def _of_preferences(session: "Session", wants_stop: Callable[[], bool]) -> Objectives | None:
    plan = session.plan
    if plan.chosen.loss is LossHead.FUSED_LINEAR:
        raise InputError(
            "pin.loss: fused_linear and train.objective: dpo exclude each other; Liger makes its gradients before the "
            "weight of a row is known: use pin.loss=chunked"
        )
    turn_dropout_off(session.model)
    reference = _reference(session, wants_stop)
    if reference is None:
        return None
    loss = DpoLoss(plan.job.train.dpo.beta, reference)
    return Objectives(loss, loss)


_BUILDERS: dict[job.Objective, Callable[["Session", Callable[[], bool]], Objectives | None]] = complete(
    OBJECTIVES,
    {
        job.Objective.PRETRAIN: _of_token_losses,
        job.Objective.SFT: _of_token_losses,
        job.Objective.DPO: _of_preferences,
    },
    "the builders of objectives",
)


def _reference(session: "Session", wants_stop: Callable[[], bool]) -> Reference | None:
    plan, paths, ranks = session.plan, session.paths, session.ranks
    if plan.chosen.method.freezes_base:
        return plain_base
    if plan.is_trial:
        return no_reference
    fingerprint = reference_fingerprint(plan)
    if session.state.resumed_from_step:  # from step 0 the weights are still those of the start
        path = paths.resume_dir / REFERENCE_NAME
        found = read_reference(path, fingerprint=fingerprint, ranks=ranks)
        if found is None:
            raise EnvironmentFaultError(
                f"--resume: {path} is missing: it holds the log-probabilities of every pair before step 1, which the "
                "changed weights cannot give again;\nput it back, or start a new run without --resume"
            )
        return found
    path, found = paths.run_dir / REFERENCE_NAME, None
    with suppress(InputError):  # of another start: it is computed anew
        found = read_reference(path, fingerprint=fingerprint, ranks=ranks)  # of an attempt without a checkpoint
    if found is None:
        found = _run_every_row(session, wants_stop)
        if found is not None:
            write_reference(path, found, fingerprint=fingerprint, ranks=ranks)
    return found


def _run_every_row(session: "Session", wants_stop: Callable[[], bool]) -> RowLogps | None:
    """Runs the model on every row of both splits; progress is reported in tenths."""
    splits = [rows for rows in (session.train_rows, session.eval_rows) if rows is not None]
    accelerator, micro_batch = session.accelerator, session.plan.chosen.micro_batch
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    total = sum(-(-len(rows) // (num_ranks * micro_batch)) for rows in splits)
    count = 0

    def goes_on() -> bool:
        nonlocal count
        if count == 0 or count * 10 // total > (count - 1) * 10 // total:
            session.writer.write_status(f"{REFERENCE_PHASE}, {count * 100 // total} % done")
        count += 1
        return session.ranks.all_agree(not wants_stop())

    every = chain.from_iterable(
        eval_micro_batches(rows, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch) for rows in splits
    )
    return logps_of_rows(session.model, every, accelerator.device, session.ranks, goes_on=goes_on)
