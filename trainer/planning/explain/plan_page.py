"""A plan in words: what runs and why, what it needs part by part, what else could run, and what could not and why.

From the plan alone. `plan_page` and `comparison_page` gather what is said, `explain_plan` and `compare_plans` write it
as plain text; `page_html` writes the same pages as HTML.
"""

from collections.abc import Sequence

from shardwise.trainer.planning.explain.choice import cache_section, choice_section, heading, machine_words
from shardwise.trainer.planning.explain.sections import (
    Answer,
    comparison_section,
    fallbacks_section,
    leave_section,
    memory_section,
    methods_section,
    rejections_section,
    runners_up_section,
    speed_section,
)
from shardwise.trainer.planning.page.content import Page, Section, Sentence
from shardwise.trainer.planning.page.text_layout import page_text
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.reasons.opt_in import leaves
from shardwise.trainer.spec.plan import Plan

__all__ = ["Answer", "compare_plans", "comparison_page", "explain_plan", "machine_words", "plan_page"]


def explain_plan(plan: Plan, *, top: int = 3, width: int = 100, more: Sequence[Section] = ()) -> str:
    """The plan as text of at most `width` columns, with the `top` runners-up."""
    return page_text(plan_page(plan, top=top, more=more), width=width)


def compare_plans(answers: Sequence[Answer], *, width: int = 100) -> str:
    """Several machines side by side: what each would run, how fast, for how much, and which is best at what."""
    _, _, text = page_text(comparison_page(answers), width=width).partition("\n\n")
    return text


def plan_page(plan: Plan, *, top: int = 3, more: Sequence[Section] = ()) -> Page:
    """All that is said of one plan; `more` stands before the notes."""
    context = context_of(plan)
    sections = (
        choice_section(plan, context),
        memory_section(plan, context),
        speed_section(plan, context),
        cache_section(plan),
        _sentences("why", plan.chosen.reasons),
        methods_section(plan),
        runners_up_section(plan, context, top),
        leave_section(leaves(context, plan), plan),
        fallbacks_section(plan),
        rejections_section(plan.rejections),
        *more,
        _sentences("notes", (*plan.notes, *(f"not used: {words}" for words in plan.hardware.excluded))),
    )
    return Page(title=heading(plan), sections=tuple(section for section in sections if section is not None))


def comparison_page(answers: Sequence[Answer]) -> Page:
    """Several machines for one job."""
    names = [answer.name for _, answer in answers if isinstance(answer, Plan)]
    title = f"{names[0] if names else 'the job'} on {len(answers)} machines"
    return Page(title=title, sections=(comparison_section(answers),))


def _sentences(title: str, texts: Sequence[str]) -> Section | None:
    return Section(title=title, blocks=tuple(Sentence(text=text) for text in texts)) if texts else None
