"""What the first steps of a run show: rows, loss, gradient and update are compared with the plan, differences named.

`FirstSteps` is the whole interface: `before_step`, `after_step`, `end_if_certain`. It is active in the first four steps
of a start, also of a resumed one, and holds nothing afterwards. `train.check_first_steps: false` switches it off.

A certain problem ends the run with exit code 4, as a difference between what was planned and what was built does
(`engines.accelerator`): a run that learns something else is not worth its time, and nothing is lost before step 5. It
is not restarted, as the same would happen again. What may have another reason is named once, and the run goes on; so is
everything on a GPU, where these comparisons were not measured yet.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.data.stream.rows import StepRows
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.loop.first_steps import experts, loss, rows, update
from shardwise.trainer.runtime.loop.first_steps.gradient import GradientCheck
from shardwise.trainer.runtime.loop.first_steps.problem import Problem
from shardwise.trainer.runtime.loop.objectives import DpoLoss, UserLoss
from shardwise.trainer.runtime.loop.session import Session
from shardwise.trainer.runtime.loop.step import Objective, StepResult, forward, sum_over_ranks
from shardwise.trainer.runtime.loss import LossOutput
from shardwise.trainer.runtime.memory.compilation import without_compilation
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.optimizers import unwrapped, updates_in_backward
from shardwise.trainer.runtime.run.state import IncidentKind, step_of_rows
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.spec.data.order import DataOrder
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import learning_rate
from shardwise.trainer.spec.strategy import Method, Precision

__all__ = ["NUM_STEPS", "FirstSteps"]

NUM_STEPS = 4  # that are compared


class _Order(NamedTuple):
    """The order of these rows under a seed."""

    rows: TokenRows
    seed: int
    order: DataOrder


class FirstSteps:
    """Compares the first steps of a start with the plan."""

    def __init__(self, session: Session, objective: Objective) -> None:
        plan, state = session.plan, session.state
        self._session: Session | None = None
        if plan.job.train.check_first_steps and not plan.is_trial:
            self._session = session
        self._objective = objective
        self._last = (state.resumed_from_step or 0) + NUM_STEPS
        self._problems: list[Problem] = []
        self._order: _Order | None = None
        self._seen: set[int] = set()  # examples
        self._before: list[tuple[update.Watched, update.Elements]] = []
        self._movements: list[update.Movement] = []  # of the last step
        self._contents: frozenset[bytes] = frozenset()  # of its rows
        self._moving: list[update.Moving] = []
        self._rates: list[float] = []  # of the steps that were taken
        self._has_compared_loss = False
        self._gradient: GradientCheck | None = None  # of the step that runs
        self._has_compared_gradient = False
        self._num_tokens = 0  # of the steps that were taken

    def before_step(self) -> None:
        """Reads what the update of the next step will change; collective."""
        session = self._session
        if session is None:
            return
        if not self._moving:  # an evaluation may have left weights gathered, under FSDP2 as other parameters
            running_engine(session.model).release_gathered(session.model)
        inner = unwrapped(session.optimizer)
        watched = [] if updates_in_backward(session.optimizer) else update.watched_tensors(session.model, inner)
        self._before = [(each, update.read_elements(each, inner)) for each in watched]
        if not self._moving:
            self._moving = update.moving_rows(session.model, session.plan.chosen.method)
        elif not self._has_compared_gradient and _compares_gradient(session):
            self._gradient = GradientCheck(session.model, inner, session.plan.chosen.strategy.sharding)

    def after_step(self, of_step: StepRows, micro_batches: Sequence[MicroBatch], result: StepResult) -> tuple[str, ...]:
        """Problems of the step that is over, for metrics.jsonl, also added to the report; collective."""
        session = self._session
        if session is None:
            return ()
        step, schedule = session.state.step, session.plan.schedule
        stored, examples = self._compare_rows(session, of_step, micro_batches)
        if not result.was_skipped and result.fault is None:
            self._problems += rows.count_problems(
                stored, examples, num_tokens=result.num_tokens, num_targets=result.num_targets, step=step
            )
            self._num_tokens += result.num_tokens
            self._compare_update(session, rows.contents(stored, examples), result)
            if not self._has_compared_loss:
                self._has_compared_loss = True
                first = self._own_examples(session, examples)[0]
                self._problems += self._loss_problems(session, stored, first, micro_batches[0])
        if self._gradient is not None:
            self._gradient.end()
            self._gradient = None
        if step >= min(self._last, schedule.num_steps):
            optimizer = session.plan.chosen.strategy.optimizer
            self._problems += update.movement_problems(session.model, self._moving, self._rates, optimizer, step=step)
            self._problems += self._expert_problems(session)
        self._problems = _of_all_ranks(session, self._problems)
        texts = tuple(dict.fromkeys(each.text for each in self._problems))
        for text in texts:
            session.state.log.note(text, IncidentKind.FIRST_STEPS)
        return texts

    def end_if_certain(self) -> None:
        """EnvironmentFaultError with the certain problems; called once their line is written. Ends the checks."""
        session = self._session
        if session is None:
            return
        certain = [each.text for each in self._problems if each.is_certain]
        if certain and session.accelerator.device.type == "cpu":
            raise EnvironmentFaultError(
                "\n".join(certain[:2])
                + "\nwhat is trained is not what was planned; train.check_first_steps=false trains on all the same"
            )
        self._problems = []
        if session.state.step >= self._last:
            self._session, self._before, self._movements, self._moving = None, [], [], []
            self._seen, self._contents, self._order, self._rates = set(), frozenset(), None, []

    def _compare_rows(
        self, session: Session, of_step: StepRows, micro_batches: Sequence[MicroBatch]
    ) -> tuple[TokenRows, list[int]]:
        """The rows that the step should have had, and its examples."""
        plan, step = session.plan, session.state.step
        stored, place, seed = of_step
        if session.stream is None:
            stored, seed = session.train_rows, plan.job.train.seed
            place = step_of_rows(step, session.state.spikes.passed_over) - 1
        num_sequences = plan.schedule.sequences_per_step
        if self._order is None or (self._order.rows is not stored or self._order.seed != seed):
            self._order = _Order(stored, seed, rows.order_of(stored, seed=seed, sequences_per_step=num_sequences))
        examples = self._order.order.rows_of_step(place)
        own = self._own_examples(session, examples)
        self._problems += rows.row_problems(stored, micro_batches, own, step=step)
        if session.stream is None and (place + 1) * num_sequences <= len(stored):
            self._problems += rows.repeated_rows(examples, self._seen, step=step)
        return stored, examples

    def _own_examples(self, session: Session, examples: list[int]) -> list[list[int | None]]:
        chosen = session.plan.chosen
        return rows.examples_of_rank(
            examples,
            rank=dist.get_rank() if dist.is_initialized() else 0,
            num_ranks=chosen.num_ranks,
            micro_batch=chosen.micro_batch,
            accumulation=chosen.accumulation,
        )

    def _compare_update(self, session: Session, contents: frozenset[bytes], result: StepResult) -> None:
        plan, inner, step = session.plan, unwrapped(session.optimizer), session.state.step
        rate = learning_rate(plan.schedule, plan.job.train, step)
        rule = update.Rule(plan.chosen.strategy.optimizer, rate, plan.job.train.weight_decay)
        found = [update.Movement(each, before, update.read_elements(each, inner)) for each, before in self._before]
        problems = update.group_problems(inner.param_groups, rule, step=step)
        if plan.chosen.method is not Method.GALORE:
            problems = problems or update.rule_problems(found, rule, step=step)
            if session.state.resumed_from_step and step == session.state.resumed_from_step + 1 and not session.scaler:
                problems += update.lost_state_problems(found, step=step)
            problems += update.moment_problems(found, rule, step=step)
            if len(self._movements) == len(found) and contents != self._contents:
                problems += update.stale_problems(self._movements, found, rule, step=step)
        of_gradient = self._gradient_problems(session, rule, result)
        self._problems += problems or of_gradient
        self._rates.append(rate)
        self._movements, self._contents = found, contents

    def _gradient_problems(self, session: Session, rule: update.Rule, result: StepResult) -> list[Problem]:
        if self._gradient is None or result.grad_norm is None:
            return []
        self._has_compared_gradient = True
        plan, clip = session.plan, session.plan.job.train.clip
        return self._gradient.problems(
            beta=rule.first_beta,
            clip=clip if clip > 0 else math.inf,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale or 1.0,
            num_ranks=plan.chosen.num_ranks,
            eps=torch.finfo(compute_type(plan.chosen.strategy.precision)).eps,
            step=session.state.step,
        )

    def _expert_problems(self, session: Session) -> list[Problem]:
        shape, chosen = session.plan.model_shape, session.plan.chosen
        is_dense = _compares_gradient(session) and chosen.strategy.optimizer is not Optimizer.MUON
        if shape.num_experts < 2 or chosen.method.freezes_base or not is_dense:
            return []
        return experts.expert_problems(
            session.model,
            unwrapped(session.optimizer),
            chosen.strategy.sharding,
            num_experts=shape.num_experts,
            even_share=self._num_tokens * shape.experts_per_token / shape.num_experts,
            device=session.accelerator.device,
            step=session.state.step,
        )

    def _loss_problems(
        self, session: Session, stored: TokenRows, examples: Sequence[int | None], micro_batch: MicroBatch
    ) -> list[Problem]:
        """Of one micro batch of each rank at the same time: the forward of a sharded engine is collective."""
        chosen, device = session.plan.chosen, session.accelerator.device
        if isinstance(self._objective, UserLoss) or chosen.strategy.precision is Precision.FP8:
            return []
        free_bytes = max(0, chosen.memory.peak_allocated_bytes - chosen.memory.steady_allocated_bytes) // 4
        num_tokens = loss.max_tokens(session.plan.model_shape.vocab_size, free_bytes=free_bytes)
        numbers = [None if each is None else stored.rows_of(each)[0] for each in examples]
        excerpt = loss.excerpt_of(stored, micro_batch, numbers, num_tokens=num_tokens)
        num_ready = sum_over_ranks(torch.tensor([excerpt is not None], dtype=torch.int32, device=device))
        if excerpt is None or int(num_ready) < chosen.num_ranks:
            return []
        own, second = self._two_losses(session, excerpt)
        of_type, step = compute_type(chosen.strategy.precision), session.state.step
        return loss.loss_problems(own, second, of_type, step=step, num_targets=excerpt.num_targets)

    def _two_losses(self, session: Session, excerpt: loss.Excerpt) -> tuple[float, loss.SecondLoss]:
        model, device = session.model, session.accelerator.device
        was_training = model.training
        model.eval()
        with torch.no_grad(), without_compilation(plain_model(model)):
            if isinstance(self._objective, DpoLoss):
                own = -forward(model, excerpt.micro_batch, device, output=LossOutput.ROWS).sum()
            else:
                own = self._objective(model, excerpt.micro_batch, device).loss
            second = loss.second_loss(model, excerpt, device)
        model.train(was_training)
        running_engine(model).release_gathered(model)
        return float(own) / excerpt.num_targets, second


def _compares_gradient(session: Session) -> bool:
    """True if the first moments of the optimizer show the gradients of weights, and are in memory."""
    chosen = session.plan.chosen
    strategy = chosen.strategy
    is_of_weights = chosen.method is not Method.GALORE and strategy.precision is not Precision.FP8
    is_in_memory = not strategy.offload.uses_nvme and not updates_in_backward(session.optimizer)
    return update.betas_of(strategy.optimizer) is not None and is_of_weights and is_in_memory


def _of_all_ranks(session: Session, problems: Sequence[Problem]) -> list[Problem]:
    """The problems of every rank, so that all ranks end alike and the first one names them."""
    own = msgspec.json.encode([[each.text, each.is_certain] for each in problems])
    every = [msgspec.json.decode(each, type=list[tuple[str, bool]]) for each in session.ranks.exchange(own)]
    return list(dict.fromkeys(Problem(*each) for each in chain.from_iterable(every)))
