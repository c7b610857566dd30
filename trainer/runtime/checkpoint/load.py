"""Loading the newest checkpoint into a prepared engine, hashed meanwhile.

    begin     the newest folder whose names, sizes and headers are whole
    load      every rank fills what it holds, and hashes its share of the files while it reads them; then all ranks say
              whether the hashes are those of the manifest

Where they are not, the next older one is taken and fills the same memory again, all of it, so nothing of what was
damaged is left. What does not fit the job is an error only once the hashes have shown that it was saved like that.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from trainer.runtime.checkpoint.agreement import on_first, together
from trainer.runtime.checkpoint.files.manifest import CheckpointFolder, folder_name
from trainer.runtime.checkpoint.files.search import check_hashes, none_whole, open_checkpoint, skipped_words, steps_in
from trainer.runtime.checkpoint.files.shards import check_shards
from trainer.runtime.checkpoint.layout.table import engine_of
from trainer.runtime.checkpoint.ranks import Ranks
from trainer.runtime.checkpoint.restore import fill_engine
from trainer.spec.errors import InputError, ShardwiseError
from trainer.spec.strategy import Sharding


def begin_resumption(
    root: Path,
    *,
    check: Callable[[CheckpointFolder], None],
    on_skip: Callable[[str], None],
    ranks: Ranks | None = None,
) -> "Resumption | None":
    """The newest checkpoint of `root` that looks whole; None where there is none at all.

    Collective. `check` raises where one is not of this job; `on_skip` is told of a damaged one, on rank 0. An
    EnvironmentFaultError where all are damaged: to start over silently would lose the run.
    """
    ranks = ranks or Ranks.alone()
    doing = f"{root}: the newest checkpoint cannot be read"
    is_empty = on_first(ranks, lambda: b"" if steps_in(root) else b"empty", doing=doing)
    return None if is_empty else Resumption(root, check=check, on_skip=on_skip, ranks=ranks)


class Resumption:
    """A checkpoint that is about to be loaded; every method is collective."""

    checkpoint: CheckpointFolder

    def __init__(
        self,
        root: Path,
        *,
        check: Callable[[CheckpointFolder], None],
        on_skip: Callable[[str], None],
        ranks: Ranks,
    ) -> None:
        self._root, self._check, self._on_skip, self._ranks = root, check, on_skip, ranks
        self._doing = f"{root}: the newest checkpoint cannot be read"
        self._steps = steps_in(root) if ranks.is_first else []
        self._num_steps = len(self._steps)
        self._take_next()

    def load(self, model: nn.Module, optimizer: object, *, sharding: Sharding) -> int:
        """Fills weights, moments and step counts of the prepared engine; learning rates stay the job's.

        Answers how many blocks of 8-bit state were coded anew on this rank. InputError where the checkpoint does not
        fit; errors of `begin_resumption` where it turns out to be damaged and no older one is whole.
        """
        while True:
            own = sorted(self.checkpoint.manifest.files)[self._ranks.rank :: self._ranks.world_size]
            digests: dict[str, str] = {}
            problem: ShardwiseError | None = None
            try:
                num_coded_anew = together(
                    self._ranks,
                    partial(
                        fill_engine, model, optimizer, self.checkpoint, sharding=sharding, hashed=own, digests=digests
                    ),
                    doing=f"{self.checkpoint.path}: cannot be loaded",
                )
            except ShardwiseError as error:
                problem = error
            damage = self._damage(own, digests)
            if damage:
                if self._ranks.is_first:
                    self._on_skip(damage)
                self._take_next()
                continue
            if problem is not None:
                raise problem
            engine_of(sharding).settle(model)
            return num_coded_anew

    def _take_next(self) -> None:
        """The next older one, looked at and compared with the job."""
        name = on_first(self._ranks, self._next_name, doing=self._doing).decode()
        self.checkpoint = together(self._ranks, lambda: open_checkpoint(self._root / name), doing=self._doing)
        self._check(self.checkpoint)

    def _next_name(self) -> bytes:
        while self._steps:
            folder = self._root / folder_name(self._steps.pop())
            try:
                check_shards(folder, open_checkpoint(folder).manifest)
            except (InputError, OSError) as error:
                self._on_skip(skipped_words(folder, error))
            else:
                return folder.name.encode()
        raise none_whole(self._root, self._num_steps)

    def _damage(self, own: Sequence[str], digests: Mapping[str, str]) -> str:
        """Why the checkpoint is to be passed over, the same on every rank; empty where its hashes are right."""
        try:
            check_hashes(self.checkpoint, only=own, known=digests)
            words = ""
        except (InputError, OSError) as error:
            words = skipped_words(self.checkpoint.path, error)
        return next((each.decode() for each in self._ranks.exchange(words.encode()) if each), "")
