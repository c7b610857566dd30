"""Renders batches of examples on all cores, in the order in which they came.

The tokenizers library uses every core by itself, but filling a chat template is Python. So where there are many
conversations, processes of their own render them, each with its own tokenizer and template; few are rendered here, as a
process takes half a second to start. What comes out is the same: batches are answered in their order, and no example
knows of another.

A worker ends with the process that started it, however that ends.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple, TypeVar

from trainer.runtime.data.chat.rendering import Rendered, Renderer
from trainer.runtime.data.chat.template import load_chat_template
from trainer.runtime.data.sources.examples import Content
from trainer.runtime.data.tokenizer import load_tokenizer
from trainer.runtime.run.process import end_with_parent
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.job.sections import LossOn

LEAST_EXAMPLES = 4000  # for which starting processes pays
BATCHES_AHEAD = 4  # of each worker: bounds what is held in memory

T = TypeVar("T")


class RenderSettings(NamedTuple):
    """What a worker makes its renderer of."""

    tokenizer_folder: str
    chat_template: str | None
    loss_on: LossOn
    seq_len: int

    def renderer(self) -> Renderer:
        folder = Path(self.tokenizer_folder)
        template = load_chat_template(self.chat_template, folder)
        return Renderer(load_tokenizer(folder), template, self.loss_on, self.seq_len)


def rendered(
    batches: Iterable[tuple[T, Sequence[Content]]], settings: RenderSettings, *, num_workers: int
) -> Iterator[tuple[T, list[Rendered]]]:
    """Each batch's key with its examples rendered, in order; with one worker in this process."""
    if num_workers <= 1:
        renderer = settings.renderer()
        for key, contents in batches:
            yield key, renderer.render_many(contents)
        return
    with ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start, initargs=(settings,)
    ) as pool:
        waiting: deque[tuple[T, Future[list[Rendered]]]] = deque()
        try:
            for key, contents in batches:
                waiting.append((key, pool.submit(_render, contents)))
                if len(waiting) >= num_workers * BATCHES_AHEAD:
                    yield _answer(waiting.popleft())
            while waiting:
                yield _answer(waiting.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def worker_count(num_examples: int) -> int:
    """Processes for so many examples: one for each core, none beside this one for few."""
    return len(os.sched_getaffinity(0)) if num_examples >= LEAST_EXAMPLES else 1


def _answer(waited: tuple[T, "Future[list[Rendered]]"]) -> tuple[T, list[Rendered]]:
    key, future = waited
    try:
        return key, future.result()
    except BrokenProcessPool as error:
        raise EnvironmentFaultError(
            "a process that tokenises was ended from outside; SIGKILL often means that host memory ran out"
        ) from error


_RENDERER: list[Renderer] = []  # of this worker


def _start(settings: RenderSettings) -> None:
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a worker
    _RENDERER[:] = [settings.renderer()]


def _render(contents: Sequence[Content]) -> list[Rendered]:
    return _RENDERER[0].render_many(contents)
