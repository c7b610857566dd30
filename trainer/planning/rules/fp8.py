"""FP8 in a plan: the recipes that a job may use on a machine, and the one that a strategy runs.

Each installed library is a candidate with its default recipe, unless the job pins one. Before any timing torchao comes
first: compiled, it gains what is published (docs/speed-model.md); Transformer Engine runs operator by operator, and its
Python is not hidden (docs/techniques.md, 18). After a timing the faster one comes first.
"""

from collections.abc import Collection

from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.spec.fp8 import DEFAULT_RECIPES, FP8_RECIPES
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.strategy import Fp8Recipe, Precision, Strategy


def possible_recipes(job: Job, libraries: Collection[str], *, compiles: bool) -> tuple[Fp8Recipe, ...]:
    """The recipes that a job may use with these packages, the preferred first; with none of them, torchao's."""
    if job.pin.fp8_recipe is not None:
        return (job.pin.fp8_recipe,)
    installed = [recipe for recipe in DEFAULT_RECIPES if FP8_RECIPES[recipe].package in libraries]
    runs = [recipe for recipe in installed if compiles or not FP8_RECIPES[recipe].is_compiled]
    return tuple(runs or installed or DEFAULT_RECIPES[:1])


def recipes_of(context: PlanningContext) -> tuple[Fp8Recipe, ...]:
    """The recipes that the job may use here: the fastest first, if they were timed."""
    recipes = possible_recipes(context.job, context.libraries, compiles=no_compiler(context) is None)
    timed = {} if context.fp8_gain is None else {gain.recipe: gain.speedup for gain in context.fp8_gain.all}
    return tuple(sorted(recipes, key=lambda recipe: -(timed.get(recipe) or 0.0)))


def recipe_of(context: PlanningContext, strategy: Strategy) -> Fp8Recipe | None:
    """The recipe that a strategy runs; None for other precisions. Under ZeRO-3 blocks do not compile."""
    if strategy.precision is not Precision.FP8:
        return None
    recipes = recipes_of(context)
    compiles = strategy.sharding.facts.deepspeed_stage != 3 and context.job.train.router_aux_loss is None
    return next((recipe for recipe in recipes if compiles or not FP8_RECIPES[recipe].is_compiled), recipes[0])


def no_compiler(context: PlanningContext) -> str | None:
    """Why no strategy of this context compiles its blocks; None if they do."""
    if not compiles_in(context.job, context.shape):
        form = f"blocks of {context.shape.model_type} have no closed form and are planned eager"
        return form if context.job.pin.compile is None else "the job file sets pin.compile: false"
    is_settled = context.job.pin.compile is not None or context.corrections.not_compiled is None
    return None if is_settled else "blocks of this model failed to compile here"


def compiles_in(job: Job, shape: ModelShape) -> bool:
    """True if blocks of this model may be compiled, unless that failed on the machine."""
    return not shape.is_described if job.pin.compile is None else job.pin.compile
