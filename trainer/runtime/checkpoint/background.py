"""A checkpoint that is written while training goes on: copied at the step's end, written by a thread, committed later.

    step s      every rank copies its pieces into host memory and a thread begins to write and hash them
    step s+1..  at each step's end the ranks say whether their threads are done; when all are, rank 0 commits

So a checkpoint exists under its name no sooner than all of it is on the disk, as in a save that is waited for. At most
one is on its way: who begins another waits for the first. What goes wrong in a thread is raised by the next `poll` or
`finish`, the same on every rank. Only the ranks' main threads ever talk to each other.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from trainer.runtime.checkpoint.agreement import together
from trainer.runtime.checkpoint.layout.pieces import Piece
from trainer.runtime.checkpoint.save import Save


class BackgroundSave:
    """One save on its way; every method is collective."""

    def __init__(self, save: Save) -> None:
        """Copies what `save` has looked at; errors of `Save`, as far as they show before it is written."""
        self._save = save
        self.step = save.step
        self.is_over = False
        self._save.__enter__()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[bytes] | None = None
        try:
            if save.is_needed:
                doing = f"the state of step {save.step} was not copied"
                save.pieces = together(save.ranks, lambda: [_copied(each) for each in save.pieces], doing=doing)
                save.on_point("copied")
                self._written = self._writer.submit(save.write)
        except BaseException:
            self._close()
            raise

    def poll(self) -> bool:
        """Commits if every rank has written; whether the save is over. Raises as `Save` does."""
        if self.is_over:
            return True
        is_written = self._written is None or self._written.done()
        if not self._save.ranks.all_agree(is_written):
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Waits for every rank and commits."""
        if self.is_over:
            return
        try:
            if self._written is not None:
                self._save.finish(self._written.result)
        finally:
            self._close()

    def _close(self) -> None:
        """Lets go of the copy, the thread and the lock."""
        self.is_over = True
        self._writer.shutdown(wait=True)
        self._save.__exit__()
        self._save.pieces = []


def _copied(piece: Piece) -> Piece:
    """The same piece in memory that training does not touch."""
    with torch.no_grad():
        return piece._replace(values=piece.at_hand().to("cpu", copy=True), elsewhere=None)
