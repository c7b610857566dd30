"""Launches on cards that are not there: a workplace, the machines that it is put on, and the runs that came of it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from cuda_stand_in import Machine, machine_environment
from operator_cache import folder_with_operators
from workplace_factory import TINY_CONFIG, Workplace, make_workplace, read_metrics

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Report

WIDE_CONFIG = {**TINY_CONFIG, "intermediate_size": 3200}  # bitsandbytes pages the state of 100,000 elements or more


class Launch(NamedTuple):
    """A finished run: its place, its folder and what it printed."""

    place: Workplace
    run_dir: Path
    output: str

    @property
    def report(self) -> Report:
        return codec.read(self.run_dir / "report.json", Report)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for _, row in sorted(read_metrics(self.run_dir).items())]


class Launches:
    """Runs of `shardwise train` in one workplace, whose data are prepared once; DeepSpeed's operator is there."""

    def __init__(self, folder: Path) -> None:
        self.place = make_workplace(folder)
        (folder / "wide").mkdir()
        (folder / "wide" / "config.json").write_text(json.dumps(WIDE_CONFIG))
        operators = folder_with_operators("cpu_adam").parent
        (self.place.folder / "cache").mkdir()
        (self.place.folder / "cache" / operators.name).symlink_to(operators)  # a machine builds it once
        self._environments: dict[Machine, dict[str, str]] = {}

    def __call__(self, name: str, machine: Machine, *words: str, **sections: Any) -> Launch:
        """Runs the small job to its end, with sections of it replaced or merged; `--resume` goes on with run `name`."""
        here = self.on(machine)
        here.write_job(output=f"runs/{name}", **sections)
        output = here.run("train", "job.yaml", *words).stdout
        (run_dir,) = (here.folder / "runs").glob(f"{name}-2*")
        return Launch(here, run_dir, output)

    def on(self, machine: Machine) -> Workplace:
        """The workplace on a machine."""
        if machine not in self._environments:
            folder = self.place.folder / "machines" / str(len(self._environments))
            self._environments[machine] = machine_environment(machine, folder)
        return self.place._replace(environment={**self.place.environment, **self._environments[machine]})
