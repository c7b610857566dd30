"""Rendering on several cores: the same rows as on one, in the same order, and an end when a worker is killed."""

import multiprocessing
import os
import signal

import pytest
from chat_tokenizers import byte_level_folder
from conversations import assistant, user

from shardwise.trainer.runtime.data.chat.rendering import LEAST_EXAMPLES, RenderSettings, rendered, worker_count
from shardwise.trainer.runtime.data.sources import Chat, Completion, Content, Preference
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.job.sections import LossOn

BATCHES: list[tuple[int, list[Content]]] = [
    (start, [Chat([user(f"question {n}"), assistant(f"{n * 7}")] * (1 + n % 3)) for n in range(start, start + 10)])
    for start in range(0, 200, 10)
]
BATCHES.append((200, [Completion("a prompt", " and its end"), Preference("which", "this one", "that one"), Chat([])]))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = byte_level_folder(tmp_path_factory.mktemp("words") / "tokenizer", bos=None, eos="<|endoftext|>")
    return RenderSettings(str(folder), "chatml", LossOn.AUTO, 256)


def test_workers_give_the_same_rows_in_the_same_order(settings):
    alone = list(rendered(BATCHES, settings, num_workers=1))
    assert [key for key, _ in alone] == [key for key, _ in BATCHES]
    assert isinstance(alone[-1][1][2], str), "an empty chat has a reason instead"
    assert list(rendered(BATCHES, settings, num_workers=3)) == alone


def test_a_worker_that_is_killed_ends_the_preparation_with_a_reason(settings):
    found = rendered(BATCHES * 20, settings, num_workers=2)
    next(found)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFaultError, match="SIGKILL"):
        list(found)


def test_few_examples_start_no_process():
    assert worker_count(LEAST_EXAMPLES - 1) == 1
    assert worker_count(LEAST_EXAMPLES) == len(os.sched_getaffinity(0))
