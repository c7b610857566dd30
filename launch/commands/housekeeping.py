"""`shardwise init`, `probe` and `schema`: a first job file, this machine, and the schema of the job file."""

from shardwise.launch.options import InitOptions, ProbeOptions, SchemaOptions
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import ExitCode, InputError


def run_init(options: InitOptions, console: Console) -> ExitCode:
    """Writes a commented job file; raises InputError if there is one already."""
    from shardwise.launch.inputs.first_job import job_template

    text = job_template(model=options.model, data=options.data)
    try:
        with options.output.open("x") as stream:
            stream.write(text)
    except FileExistsError:
        raise InputError(f"{options.output}: exists already; name another file with -o") from None
    except OSError as error:
        raise InputError(f"{options.output}: cannot be written: {error.strerror}") from error
    console.line(f"wrote {options.output}; next: shardwise plan {options.output}")
    return ExitCode.DONE


def run_probe(options: ProbeOptions, console: Console) -> ExitCode:
    """Prints the machine's hardware, and writes it for `--hardware FILE`."""
    from shardwise.launch.probe.machine import describe_hardware, read_hardware
    from shardwise.trainer.spec import codec

    hardware = read_hardware(gpus=options.gpus, measure=options.measure)
    if options.output is not None:
        try:
            codec.write(options.output, hardware)
        except OSError as error:
            raise InputError(f"{options.output}: cannot be written: {error.strerror}") from error
    console.line(codec.encode(hardware).decode().rstrip() if options.as_json else describe_hardware(hardware))
    return ExitCode.DONE


def run_schema(_options: SchemaOptions, console: Console) -> ExitCode:
    """Prints the JSON Schema of the job file."""
    import json

    from shardwise.trainer.spec.job.fields import job_json_schema

    console.line(json.dumps(job_json_schema(), indent=2))
    return ExitCode.DONE
