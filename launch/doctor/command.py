"""`shardwise doctor [JOB]`: looks for what would make training fail or slow here, and says what mends it.

Nothing is changed and nothing is trained. Exit code 4 where there is a fault, 0 where there are warnings at most; a job
file that is wrong in itself is exit code 2, as everywhere. `doctor_checks` has the table of what is looked at.
"""

import os
import time
from collections.abc import Mapping

from msgspec.structs import replace

from launch.doctor.checks import checks_for, run_checks
from launch.doctor.finding import Diagnosis, diagnosis_of
from launch.doctor.job import JobAsked
from launch.doctor.machine import Place, place_of, read_machine
from launch.doctor.text import render_diagnosis
from launch.job import folders
from launch.job.layers import ResolvedJob, read_job_layers, read_personal_folders
from launch.options import DoctorOptions
from launch.rundir.paths import output_base
from launch.terminal import Console
from trainer.spec import codec
from trainer.spec.errors import ExitCode
from trainer.spec.secrets import redact


def run_doctor(options: DoctorOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Looks and tells; InputProblemsError for a job file or a config.yaml that cannot be read."""
    started = time.monotonic()
    resolved = None if options.job is None else _read_job(options, environment)
    named = _personal_folders(environment) if resolved is None else resolved.folders
    output = (
        None if resolved is None else output_base(resolved.job.output, resolved.name).expanduser().absolute().parent
    )
    place = place_of(environment, named=named, output=output, is_quick=options.quick)
    asked = None if options.job is None else JobAsked(options.job, tuple(options.overrides))
    diagnosis = diagnose(place, asked)
    if options.as_json:
        console.line(codec.encode(diagnosis).decode().rstrip())
    else:
        console.line(render_diagnosis(diagnosis, seconds=time.monotonic() - started))
    return diagnosis.exit_code


def diagnose(place: Place, asked: JobAsked | None = None) -> Diagnosis:
    """Everything that is found, without a secret of the environment."""
    found = diagnosis_of(run_checks(read_machine(place), checks_for(asked)))
    return replace(found, findings=tuple(
        replace(finding, sentence=redact(finding.sentence, place.environment),
                fix=finding.fix and redact(finding.fix, place.environment))
        for finding in found.findings
    ))  # fmt: skip


def _personal_folders(environment: Mapping[str, str]) -> Mapping[str, str]:
    return read_personal_folders(
        config_home=folders.config_home(environment), site_config=folders.site_config(environment)
    )


def _read_job(options: DoctorOptions, environment: Mapping[str, str]) -> ResolvedJob:
    return read_job_layers(
        options.job,
        options.overrides,
        config_home=folders.config_home(environment),
        site_config=folders.site_config(environment),
    )
