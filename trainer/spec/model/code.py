"""Code that comes with a model, as a plan names it: which files of which repository run, and the content agreed to.

It runs only where `model.trust_remote_code` names the model's own repository or folder. A run keeps a copy of the
files, and every process runs them only while their SHA-256 is the planned one. None is ever taken from a checkpoint or
an export.
"""

from typing import Any

from trainer.spec.value import Value


class ModelCode(Value, frozen=True, kw_only=True):
    """The Python files of one model."""

    repository: str  # as the job names it: ORG/NAME, or a path
    revision: str | None  # the commit, where it is from the hub
    folder: str  # absolute; of a run, the copy in its directory
    files: dict[str, str]  # sha256 by path below `folder`: the two that config.json names and what they import
    config_class: str  # MODULE.CLASS, as config.json has it
    model_class: str

    @property
    def words(self) -> str:
        """What a plan says of it."""
        at = f" at {self.revision}" if self.revision is not None else ""
        return f"code of {self.repository}{at} runs ({', '.join(sorted(self.files))})"


class DescriptionRequest(Value, frozen=True, kw_only=True):
    """A model whose shape is asked for."""

    model_config: dict[str, Any]
    origin: str  # names the config in messages
    model_code: ModelCode | None = None
    offers_code_of: str | None = None  # what `model.trust_remote_code` would have to be for code that it brings to run
