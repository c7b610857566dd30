"""What a choice is held against: the other candidates of its plan, other settings of its row, and what just missed.

A plan has one candidate for each row of the catalogue, in the setting that is predicted best for it. Beside them stand
settings that the search passed over in the row that was taken: other checkpointing, another loss head, activations in
host RAM, the next micro batches. And what the plan calls too large by a tenth or less: the cap shows who is right.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from trainer.planning.budget import excess
from trainer.planning.candidates import candidate_of, setting_of, with_micro_batch
from trainer.planning.choice import rank
from trainer.planning.planner import situation_of
from trainer.planning.rules import obstacle_to, refuse
from trainer.planning.settings_choices import activation_offloads, checkpointings, losses, micro_batches
from trainer.planning.settings_search import best_candidate, least_need
from trainer.planning.situation import Situation
from trainer.spec.hardware import DeviceKind
from trainer.spec.job import Pin
from trainer.spec.plan import Candidate, Plan
from trainer.spec.strategy import Offload, Sharding
from trainer.spec.value import Value

MOST, MOST_TINY = 8, 4  # that are run of a job, the choice among them
MOST_SETTINGS = 3  # other settings of the row that was taken, those among them that just missed
MORE_SETTINGS_WORDS = "other settings of the row that was taken"
NEAR = 0.10  # of what is granted: how far above it something is run all the same
HOST_SHARE = 0.75  # of the host's RAM: what was ruled out is not run close to where the kernel would end it


class Contender(Value, frozen=True, kw_only=True):
    """A candidate, and where it is from; `memory` and `speed` are what was predicted."""

    candidate: Candidate
    is_choice: bool = False
    is_setting: bool = False  # of the row that was taken
    beyond: str | None = None  # the budget that it exceeds, in words
    is_beyond_host: bool = False  # host RAM is among what it exceeds

    @property
    def key(self) -> str:
        """Its own among those of a plan, whenever the plan is made."""
        return words_of(self.candidate)


def words_of(candidate: Candidate) -> str:
    """`none/bf16-mixed/adamw_fused 8 x 2, full, chunked`."""
    kept = ", activations in host RAM" if candidate.activation_offload else ""
    batch = f"{candidate.micro_batch} x {candidate.accumulation}"
    return f"{candidate.strategy.name} {batch}, {candidate.checkpointing}, {candidate.loss}{kept}"


def contenders_of(plan: Plan, *, most: int = MOST) -> tuple[tuple[Contender, ...], int]:
    """What is run of a plan, the choice first, and how many more there are.

    Whatever is as exact as the choice comes before what is not: one of each layout, then settings of the row that was
    taken, then the rest as it was ranked.
    """
    choice = plan.chosen
    ranked = [Contender(candidate=candidate) for candidate in plan.candidates[1:]]
    others, missed = list(_settings(plan)), list(_missed(plan))
    layouts: set[tuple[Sharding, Offload]] = {_layout(choice)}
    firsts: list[Contender] = []
    for contender in ranked:
        if counts_beside(contender.candidate, choice) and _layout(contender.candidate) not in layouts:
            layouts.add(_layout(contender.candidate))
            firsts.append(contender)
    others.sort(key=lambda contender: contender.candidate.speed.step_s)
    rest = [contender for contender in [*missed, *ranked] if contender not in firsts]
    rest.sort(key=lambda contender: not counts_beside(contender.candidate, choice))
    ordered = _distinct(
        [Contender(candidate=choice, is_choice=True), *firsts, *others[:MOST_SETTINGS], *rest, *others[MOST_SETTINGS:]]
    )
    return tuple(ordered[:most]), len(ordered[most:])


def counts_beside(candidate: Candidate, choice: Candidate) -> bool:
    """Whether a candidate does what the job asks at least as faithfully as the choice: same method, as exact."""
    is_as_exact = candidate.strategy.is_exact or not choice.strategy.is_exact
    return candidate.method is choice.method and is_as_exact


def host_bytes(candidate: Candidate) -> int:
    """Host RAM of a candidate, pinned and pageable."""
    return candidate.memory.pinned_bytes + candidate.memory.host_bytes


def context_bytes(plan: Plan) -> int:
    """What a cap grants to the process and not to its tensors: on a CPU the plan counts the libraries as well."""
    situation = situation_of(plan)
    return situation.device.context_bytes if plan.device_kind is DeviceKind.CPU else 0


def _layout(candidate: Candidate) -> tuple[Sharding, Offload]:
    return candidate.strategy.sharding, candidate.strategy.offload


def _distinct(contenders: list[Contender]) -> list[Contender]:
    first: dict[str, Contender] = {}
    for contender in contenders:
        first.setdefault(contender.key, contender)
    return list(first.values())


def _settings(plan: Plan) -> Iterator[Contender]:
    """Other settings of the row that was taken, which fit or just miss."""
    situation, choice = situation_of(plan), plan.chosen
    sizes = micro_batches(situation, choice.strategy)
    smaller = [size for size in sizes if size < choice.micro_batch][-1:]
    found = [candidate for size in smaller if (candidate := _resized(situation, choice, size)) is not None]
    apart = [
        best_candidate(pinned, choice.strategy) or least_need(pinned, choice.strategy)
        for pinned in _pinned_apart(situation, choice)
        if refuse(pinned, choice.strategy) is None
    ]
    for start in (choice, *apart):  # the next micro batch of each is too large, or was found no faster
        larger = [size for size in sizes if size > start.micro_batch][:1]
        found += [candidate for size in larger if (candidate := _resized(situation, start, size)) is not None]
    for candidate in (*apart, *found):
        yield from _near(plan, situation, candidate, is_setting=True)


def _resized(situation: Situation, candidate: Candidate, micro_batch: int) -> Candidate | None:
    setting = with_micro_batch(situation, setting_of(situation, candidate), micro_batch)
    return candidate_of(situation, setting) if obstacle_to(situation, setting) is None else None


def _pinned_apart(situation: Situation, choice: Candidate) -> Iterator[Situation]:
    """The situation with one mechanism pinned to what was not taken."""

    def pinned(**changed: object) -> Situation:
        pin: Pin = replace(situation.job.pin, **changed)
        return replace(situation, job=replace(situation.job, pin=pin))

    for checkpointing in checkpointings(situation):
        if checkpointing is not choice.checkpointing:
            yield pinned(checkpointing=checkpointing)
    for loss in losses(situation):
        if loss is not choice.loss:
            yield pinned(loss=loss)
    for offloads in activation_offloads(situation):
        if offloads is not choice.activation_offload:
            yield pinned(activation_offload=offloads)


def _missed(plan: Plan) -> Iterator[Contender]:
    """Rows that a number ruled out, and only just: by the cap, or by the host RAM that the job grants."""
    situation = situation_of(plan)
    for candidate in rank(situation).smallest.values():
        yield from _near(plan, situation, candidate)


def _near(plan: Plan, situation: Situation, candidate: Candidate, *, is_setting: bool = False) -> Iterator[Contender]:
    """A candidate with the budget that it exceeds, where it may be run all the same."""
    over = excess(situation, candidate)
    contender = Contender(candidate=candidate, is_setting=is_setting)
    if over is None:
        yield contender
    elif _is_near(plan, candidate):
        granted = None if situation.is_cpu else situation.host_ram_bytes
        is_beyond_host = granted is not None and host_bytes(candidate) > granted
        yield replace(contender, beyond=over.reason, is_beyond_host=is_beyond_host)


def _is_near(plan: Plan, candidate: Candidate) -> bool:
    """Whether the device has nearly enough, and the host what it takes, job or not."""
    memory = candidate.memory
    if memory.need_bytes - memory.usable_bytes > NEAR * (memory.usable_bytes - context_bytes(plan)):
        return False
    host = plan.hardware.host
    there = host.ram_available_bytes or host.ram_bytes
    return plan.device_kind is DeviceKind.CPU or (there is not None and host_bytes(candidate) <= HOST_SHARE * there)
