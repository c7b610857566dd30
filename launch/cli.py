"""The `shardwise` command. Parses, calls one function a command, maps errors to exit codes; decides nothing itself.

Each command imports what it needs when it runs: `probe`, `plan`, `report` answer without loading torch.
"""

import argparse
import atexit
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.commands.options import parse_words
from launch.terminal import Console, write_error
from trainer.spec.errors import ExitCode, InputError, ShardwiseError
from trainer.spec.secrets import redacted_output

# Objects made before the collector looks for cycles. Python's 700 cost a start ten milliseconds and find next to none.
GC_THRESHOLD = 100_000


def _print_traceback() -> None:
    import traceback  # three milliseconds of every start, for --debug

    traceback.print_exc()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Nothing that is printed shows a secret of the environment."""
    with redacted_output():
        return _answer(argv)


def _answer(argv: Sequence[str] | None) -> int:
    gc.set_threshold(GC_THRESHOLD)
    atexit.register(gc.freeze)  # or Python looks for cycles once more at exit: 15 ms for memory that goes back anyway
    words = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in words
    try:
        return int(_run([word for word in words if word != "--debug"]))
    except ShardwiseError as error:
        if is_debug:
            _print_traceback()
        write_error(f"shardwise: {error}")
        return int(error.exit_code)
    except KeyboardInterrupt:
        write_error("shardwise: interrupted")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        return int(ExitCode.DONE)
    except Exception as error:  # noqa: BLE001 - the last resort: a fault of ours must still end in one line
        if is_debug:
            _print_traceback()
        write_error(
            f"shardwise: internal error: {type(error).__name__}: {error}\n"
            "please report it with the traceback that --debug shows"
        )
        return int(ExitCode.INTERNAL)


def _run(words: list[str]) -> ExitCode:
    options = parse_words(words)
    return _COMMANDS[options.command](options)


def _init(options: argparse.Namespace) -> ExitCode:
    from launch.inputs.first_job import job_template

    output: Path = options.output
    text = job_template(model=options.model, data=options.data)
    try:
        with output.open("x") as stream:
            stream.write(text)
    except FileExistsError:
        raise InputError(f"{output}: exists already; name another file with -o") from None
    except OSError as error:
        raise InputError(f"{output}: cannot be written: {error.strerror}") from error
    Console().line(f"wrote {output}; next: shardwise plan {output}")
    return ExitCode.DONE


def _probe(options: argparse.Namespace) -> ExitCode:
    from launch.probe.machine import describe_hardware, read_hardware
    from trainer.spec import codec

    hardware = read_hardware(gpus=options.gpus, measure=options.measure)
    if options.output is not None:
        try:
            codec.write(options.output, hardware)
        except OSError as error:
            raise InputError(f"{options.output}: cannot be written: {error.strerror}") from error
    Console().line(codec.encode(hardware).decode().rstrip() if options.json else describe_hardware(hardware))
    return ExitCode.DONE


def _plan(options: argparse.Namespace) -> ExitCode:
    from launch.commands.plan import PlanOptions, run_plan

    return run_plan(
        PlanOptions(
            job=options.job,
            overrides=options.overrides,
            gpus=options.gpus,
            vram_cap_bytes=options.vram,
            specs=options.hardware or [],
            take=options.take,
            top=options.top,
            simulate=options.simulate,
            trial=options.trial,
            longest_seq=options.longest_seq,
            largest_batch=options.largest_batch,
            largest_model=options.largest_model,
            html=options.html,
            as_json=options.json,
            partition=options.partition,
            nodes=options.nodes,
            constraint=options.constraint,
        ),
        Console(),
    )


def _estimate(options: argparse.Namespace) -> ExitCode:
    from launch.commands.estimate import run_estimate

    return run_estimate(options.cases)


def _train(options: argparse.Namespace) -> ExitCode:
    from launch.commands.train import next_commands, train
    from launch.run.prepare_run import TrainOptions
    from trainer.spec import codec

    console = Console(sys.stderr if options.json else None)
    outcome = train(
        TrainOptions(
            job=options.job,
            overrides=options.overrides,
            gpus=options.gpus,
            vram_cap_bytes=options.vram,
            run_dir=options.run_dir,
            resume=options.resume,
            dry_run=options.dry_run,
            take=options.take,
            trial=options.trial,
            here=options.here,
            nodes=options.nodes,
            node_rank=options.node_rank,
            head=options.head,
        ),
        console,
    )
    if options.json and outcome.report is not None:
        Console().line(codec.encode(outcome.report).decode().rstrip())
    if outcome.exit_code is ExitCode.DONE and outcome.run_dir is not None and outcome.report is not None:
        console.line()
        console.line("next:")
        for command in next_commands(outcome.run_dir, str(options.job)):
            console.line(f"  {command}")
    return outcome.exit_code


def _submit(options: argparse.Namespace) -> ExitCode:
    from launch.commands.options import SUBMIT_SETTINGS
    from launch.commands.submit import SubmitOptions, run_submit

    return run_submit(
        SubmitOptions(
            job=options.job,
            overrides=options.overrides,
            settings={setting: getattr(options, setting) for setting, _, _ in SUBMIT_SETTINGS.values()},
            spec=options.hardware,
            sweeps=options.sweep,
            run_dir=options.run_dir,
            dry_run=options.dry_run,
            as_json=options.json,
        ),
        Console(),
        Console(sys.stderr),
    )


def _fetch(options: argparse.Namespace) -> ExitCode:
    from launch.commands.fetch import FetchOptions, run_fetch

    return run_fetch(
        FetchOptions(job=options.job, overrides=options.overrides, prepare=not options.no_prepare), Console()
    )


def _status(options: argparse.Namespace) -> ExitCode:
    from launch.commands.status import StatusOptions, run_status

    return run_status(StatusOptions(run=options.run, as_json=options.json, sync=options.sync), Console())


def _logs(options: argparse.Namespace) -> ExitCode:
    from launch.commands.logs import LogsOptions, run_logs

    return run_logs(
        LogsOptions(
            run=options.run,
            rank=options.rank,
            attempt=options.attempt,
            follow=options.follow,
            num_lines=options.lines,
        ),
        Console(),
    )


def _watch(options: argparse.Namespace) -> ExitCode:
    from launch.commands.watch import WatchOptions, run_watch

    return run_watch(WatchOptions(run=options.run, once=options.once, as_json=options.json), Console())


def _ladder(options: argparse.Namespace) -> ExitCode:
    from launch.commands.ladder import LadderOptions, run_ladder

    return run_ladder(
        LadderOptions(
            job=options.job,
            overrides=options.overrides,
            rungs=options.rungs,
            gpus=options.gpus,
            vram_cap_bytes=options.vram,
            num_steps=options.steps,
            csv=options.csv,
            html=options.html,
            as_json=options.json,
        ),
        Console(),
        Console(sys.stderr),
    )


def _profile(options: argparse.Namespace) -> ExitCode:
    from launch.commands.profile import ProfileOptions, run_profile

    return run_profile(
        ProfileOptions(
            job=options.job,
            overrides=options.overrides,
            gpus=options.gpus,
            vram_cap_bytes=options.vram,
            out=options.out,
            num_steps=options.steps,
            only_time=options.time,
            as_json=options.json,
        ),
        Console(),
        Console(sys.stderr),
    )


def _cancel(options: argparse.Namespace) -> ExitCode:
    from launch.commands.cancel import CancelOptions, run_cancel

    return run_cancel(CancelOptions(run=options.run, now=options.now), Console())


def _doctor(options: argparse.Namespace) -> ExitCode:
    from launch.doctor.command import DoctorOptions, run_doctor

    return run_doctor(
        DoctorOptions(job=options.job, overrides=options.overrides, quick=options.quick, as_json=options.json),
        Console(),
    )


def _cache(options: argparse.Namespace) -> ExitCode:
    from launch.commands.cache import CacheOptions, run_cache

    return run_cache(
        CacheOptions(
            prune=options.prune, older_than_days=options.older_than, dry_run=options.dry_run, as_json=options.json
        ),
        Console(),
    )


def _report(options: argparse.Namespace) -> ExitCode:
    from launch.commands.report import ReportOptions, run_report

    return run_report(
        ReportOptions(run_dirs=options.run_dirs, html=options.html, as_json=options.json),
        Console(),
    )


def _export(options: argparse.Namespace) -> ExitCode:
    from launch.commands.export import ExportOptions, run_export

    return run_export(
        ExportOptions(
            run_dir=options.run_dir,
            output=options.output,
            merge=options.merge,
            format=options.format,
            dtype=options.dtype,
            checkpoint=options.checkpoint,
            check=not options.no_check,
            push=options.push,
            public=options.public,
            as_json=options.json,
        )
    )


def _import(options: argparse.Namespace) -> ExitCode:
    from launch.commands.importing import ImportOptions, run_import

    return run_import(
        ImportOptions(
            checkpoint=options.checkpoint,
            output=options.output,
            kind=options.kind,
            config=options.config,
            base=options.base,
            dtype=options.dtype,
            as_json=options.json,
        )
    )


def _data(options: argparse.Namespace) -> ExitCode:
    from launch.commands.data import run_data

    return run_data(options.job, options.overrides, Console())


def _chat(options: argparse.Namespace) -> ExitCode:
    from launch.commands.chat import ChatOptions, run_chat

    return run_chat(
        ChatOptions(
            run_dir=options.run_dir,
            checkpoint=options.checkpoint,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            system=options.system,
        )
    )


def _workspace(options: argparse.Namespace) -> ExitCode:
    from launch.track.wandb.command import WorkspaceOptions, run_workspace

    return run_workspace(
        WorkspaceOptions(project=options.project, entity=options.entity, as_json=options.json), Console()
    )


def _schema(_options: argparse.Namespace) -> ExitCode:
    import json

    from trainer.spec.job.fields import job_json_schema

    Console().line(json.dumps(job_json_schema(), indent=2))
    return ExitCode.DONE


_COMMANDS = {
    "init": _init,
    "probe": _probe,
    "plan": _plan,
    "estimate": _estimate,
    "train": _train,
    "submit": _submit,
    "fetch": _fetch,
    "status": _status,
    "logs": _logs,
    "watch": _watch,
    "ladder": _ladder,
    "profile": _profile,
    "cancel": _cancel,
    "doctor": _doctor,
    "cache": _cache,
    "report": _report,
    "export": _export,
    "import": _import,
    "chat": _chat,
    "data": _data,
    "workspace": _workspace,
    "schema": _schema,
}

if __name__ == "__main__":
    sys.exit(main())
