"""Rendering of `train.sbatch`: the options of a job as `#SBATCH` lines, then the program of its first node. Pure.

`#SBATCH` lines are read by sbatch, not by a shell. It splits them at white space, reads `#` as the start of a comment,
and supports quotes and backslashes. A value in double quotes with both escaped arrives unchanged (tested on Slurm 22.05
for every printable character), except control characters. In --output `%` begins a pattern, and a backslash switches
patterns off. Everything below is shell: each text goes through shlex.quote.

In the program one supervisor for the whole job runs as a background child, so that the shell receives signals while it
waits. USR1 comes ahead of the time limit and of a preemption, TERM when Slurm ends the job. Both are forwarded to the
supervisor as USR1: the ranks save one step and the supervisor ends with 75. Then the job has to continue:

    the next job of a chain waits     nothing to do: it starts when this one ends
    Slurm can queue the job again     scontrol requeue, which ends this script with TERM
    Slurm refuses (--no-requeue)      a new job that starts when this one ends
    Slurm is ending the job itself    scancel ends the run; a time limit or a preemption does not. The state is
                                      COMPLETING for all of them, but the job's output names the reason. scontrol
                                      requeue would restart a cancelled job

Images of containers run in one of two runtimes:

    NAME, docker://NAME, FILE.sqsh    pyxis, a plugin of Slurm: options of srun
    FILE.sif, oras://, library://     Apptainer (or Singularity): a program that srun starts
    docker://NAME without pyxis       Apptainer

There is no Slurm inside a container, so the batch script stays outside: one `srun` starts one command on each node,
inside, with the number of the node and the address of the first, as on machines without Slurm.
"""

import re
import shlex
import unicodedata
from collections.abc import Sequence
from enum import StrEnum

from shardwise.slurm.cluster import format_duration
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.submission import CHAIN_FILE, JOBS_FILE, SCRIPT_NAME
from shardwise.trainer.spec.units import MIB
from shardwise.trainer.spec.value import Value

MIN_WARNING_S = 120
EARLY_S = 60  # the resolution of Slurm's clock (man sbatch, --signal)
MARGIN_S = 60  # for ranks to agree, and for a slow file system
MAX_WARNING_S = 65535  # of --signal
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_LONG = re.compile(r"--([a-z][a-z0-9-]*)(?:[= ]\s*(.*))?", re.DOTALL)
_SHORT = re.compile(r"-([A-Za-z])\s*(.*)", re.DOTALL)
_OWN_OPTIONS = (
    "array", "wrap", "test-only", "wait", "parsable", "signal", "output", "open-mode", "ntasks-per-node", "ntasks",
    "nodes", "chdir",
)  # fmt: skip
_OWN_LETTERS = {"a": "array", "W": "wait", "o": "output", "n": "ntasks", "N": "nodes", "D": "chdir"}


class Runtime(StrEnum):
    """The program that starts containers."""

    PYXIS = "pyxis"
    APPTAINER = "apptainer"


class Container(Value, frozen=True, kw_only=True):
    """An image, and the folders of the machine that are mounted inside, under the same paths."""

    runtime: Runtime
    image: str
    folders: tuple[str, ...] = ()


class BatchJob(Value, frozen=True, kw_only=True):
    """One job, or an array of them, with the values of sbatch's options. Paths are absolute."""

    name: str
    summary: str  # for readers of the script
    written_by: str  # shardwise and its version
    run_dir: str  # of a sweep the folder that holds the points
    workdir: str  # in which the job file's relative paths begin
    program_dir: str  # of the interpreter and of shardwise
    num_nodes: int = 1
    gres: str | None = None  # of each node: gpu:h100:8
    uses_gres_option: bool = False  # --gres in place of --gpus-per-node
    num_cores: int | None = None
    memory_bytes: int | None = None
    uses_whole_nodes: bool = True
    time_limit_s: int | None = None
    warning_s: int = MIN_WARNING_S
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    mail: str | None = None
    comment: str | None = None
    requeue: bool = True
    num_points: int | None = None  # of a sweep
    extra: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    container: Container | None = None
    is_offline: bool = False
    scratch: str | None = None  # node-local


def warning_s(*, step_s: float, save_s: float, time_limit_s: int | None) -> int:
    """Seconds of warning before the time limit: for a step, a save and a margin, at most half of the limit."""
    wanted = max(MIN_WARNING_S, round(step_s + save_s + MARGIN_S + EARLY_S))
    limit = MAX_WARNING_S if time_limit_s is None else min(MAX_WARNING_S, time_limit_s // 2)
    return min(wanted, limit)


def render_script(job: BatchJob) -> str:
    """The text of `train.sbatch`; InputError for a value that cannot arrive as it is."""
    options = [f"#SBATCH {sbatch_line(option)}" for option in sbatch_options(job)]
    script = f"{job.run_dir}/{SCRIPT_NAME}"
    head = [
        "#!/bin/bash -l" if job.modules else "#!/bin/bash",  # a login shell knows `module`
        f"# {_one_line(job.name)}: {_one_line(job.summary)}",
        f"# Written by {job.written_by}, and yours to edit. Submitted again, it resumes from the newest checkpoint:",
        f"#   sbatch {shlex.quote(script)}",
        "",
    ]
    body = script_body(
        run_dir=job.run_dir,
        workdir=job.workdir,
        script=script,
        program_dir=job.program_dir,
        is_array=job.num_points is not None,
        modules=job.modules,
        container=job.container,
        is_offline=job.is_offline,
        scratch=job.scratch,
    )
    return "\n".join([*head, *options, "", body])


def sbatch_options(job: BatchJob) -> list[str]:
    """The options of sbatch, unquoted."""
    stated = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "reservation": job.reservation,
        "comment": job.comment,
        "mail-user": job.mail,
    }
    for name, value in stated.items():
        if value is not None:
            _refuse_control(value, f"--{name}")
    options = [f"--{name}={value}" for name, value in stated.items() if value is not None]
    options += ["--mail-type=END,FAIL,REQUEUE"] if job.mail is not None else []
    options += [f"--nodes={job.num_nodes}", "--ntasks-per-node=1", *_devices(job), *_share(job)]
    options += [f"--time={format_duration(job.time_limit_s)}"] if job.time_limit_s is not None else []
    options += [f"--signal=B:USR1@{job.warning_s}", "--requeue" if job.requeue else "--no-requeue"]
    options += [f"--array=1-{job.num_points}"] if job.num_points is not None else []
    return [*options, *_places(job), *_checked_extra(job.extra)]


def sbatch_line(option: str) -> str:
    """One option as the text of a `#SBATCH` line; InputError if it cannot be one."""
    name, equals, value = option.partition("=") if option.startswith("--") else (option[:2], "", option[2:])
    _refuse_control(option, name)
    if not value or _PLAIN.fullmatch(value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def _devices(job: BatchJob) -> list[str]:
    if job.gres is None:
        return []
    return [f"--gres={job.gres}"] if job.uses_gres_option else [f"--gpus-per-node={job.gres.removeprefix('gpu:')}"]


def _share(job: BatchJob) -> list[str]:
    if job.uses_whole_nodes:
        return ["--exclusive", "--mem=0"]
    cores = [f"--cpus-per-task={job.num_cores}"] if job.num_cores is not None else []
    memory = [f"--mem={-(-job.memory_bytes // MIB)}M"] if job.memory_bytes is not None else []
    return [*cores, *memory]


def _places(job: BatchJob) -> list[str]:
    """Options for the working directory and the output of the job."""
    for path, name in ((job.run_dir, "the run directory"), (job.workdir, "the working directory")):
        _refuse_control(path, name)
    if "\\" in job.run_dir:
        raise InputError(f"{job.run_dir}: Slurm cannot write to a path with a backslash; choose another --run-dir")
    folder = job.run_dir.replace("%", "%%")
    file = f"{folder}/slurm-%j.out" if job.num_points is None else f"{folder}/point-%a/slurm-%A_%a.out"
    return [f"--chdir={job.workdir}", f"--output={file}", "--open-mode=append"]


def _checked_extra(extra: Sequence[str]) -> list[str]:
    """Each as `--name=value`, `--name` or `-xvalue`; InputError for other text and for options that shardwise sets."""
    options = []
    for text in extra:
        long, short = _LONG.fullmatch(text.strip()), _SHORT.fullmatch(text.strip())
        if long is None and short is None:
            raise InputError(f"slurm.extra: {text!r} is not an option of sbatch, such as --constraint=a100")
        name, value = (long or short).groups()  # type: ignore[union-attr] # one of them matched
        if long is not None:
            options.append(f"--{name}" if value is None else f"--{name}={value}")
        else:
            name, value = _OWN_LETTERS.get(name, name), f"-{name}{value}"
            options.append(value)
        if name in _OWN_OPTIONS:
            raise InputError(f"slurm.extra: {text}: shardwise sets --{name} itself; remove it")
    return options


def _refuse_control(text: str, name: str) -> None:
    """InputError for line breaks, other control characters, and bytes that are not UTF-8."""
    found = next((each for each in text if unicodedata.category(each) in ("Cc", "Cs")), None)
    if found is not None:
        raise InputError(f"{name}: {text!r} holds {found!r}; a line of a batch script can hold no such character")


def _one_line(text: str) -> str:
    """The text for a comment: characters that could end its line become spaces."""
    return "".join(" " if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") else each for each in text)


_APPTAINER_IMAGES = ("oras://", "library://", "shub://")


def container_of(image: str, *, folders: Sequence[str], has_pyxis: bool) -> Container:
    """The container for `slurm.container`; InputError for a folder it cannot mount, and without a runtime for it."""
    for folder in folders:
        if re.search(r"[:,]", folder):
            raise InputError(
                f"{folder}: a container cannot mount a folder with a colon or a comma in its path; rename it"
            )
    mounted = _without_nested(folders)
    if image.endswith(".sif") or image.startswith(_APPTAINER_IMAGES):
        return Container(runtime=Runtime.APPTAINER, image=image, folders=mounted)
    if has_pyxis:
        return Container(runtime=Runtime.PYXIS, image=_pyxis_name(image), folders=mounted)
    if image.startswith("docker://"):
        return Container(runtime=Runtime.APPTAINER, image=image, folders=mounted)
    raise InputError(
        f"slurm.container: {image} needs pyxis, and srun has no --container-image on this cluster; "
        "write docker://NAME or a .sif file, which Apptainer runs"
    )


def srun_parts(container: Container, *, workdir: str) -> tuple[list[str], list[str]]:
    """Options of srun, and the command before the program; quoted for the shell."""
    mounts = ",".join(f"{folder}:{folder}" for folder in container.folders)
    if container.runtime is Runtime.PYXIS:
        options = [f"--container-image={container.image}", f"--container-workdir={workdir}"]
        options += [f"--container-mounts={mounts}"] if mounts else []
        return [shlex.quote(option) for option in options], []
    binds = ["--bind", mounts] if mounts else []
    command = ["exec", "--nv", *binds, "--pwd", workdir, container.image]
    return [], ['"$apptainer"', *map(shlex.quote, command)]


def _pyxis_name(image: str) -> str:
    """The name as every version of pyxis reads it: with `#` after a registry."""
    name = image.removeprefix("docker://")
    registry, slash, rest = name.partition("/")
    if image.startswith("docker://") and slash and "#" not in name and re.search(r"[.:]|^localhost$", registry):
        return f"{registry}#{rest}"
    return name


def _without_nested(folders: Sequence[str]) -> tuple[str, ...]:
    """Each folder once, without those inside another."""
    unique = sorted(set(folders))
    return tuple(folder for folder in unique if not any(folder.startswith(f"{other.rstrip('/')}/") for other in unique))


_RECORD = f"""\
# Each start: time, job, number of restarts, nodes.
printf '%s %s %s %s\\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$job" "${{SLURM_RESTART_COUNT:-0}}" "$SLURM_JOB_NODELIST" \\
    >>"$run_dir/{JOBS_FILE}"
"""

_SIGNALS = """\
# Slurm sends USR1 ahead of the time limit or of a preemption, and TERM when it ends the job. Both are forwarded to the
# supervisor as USR1: every rank saves the same step, and it ends with 75.
supervisor='' was_stopped='' was_signalled=''
forward() {
    was_signalled=yes was_stopped=yes
    [ -z "$supervisor" ] || kill -USR1 "$supervisor" 2>/dev/null || :
}
trap forward USR1 TERM
"""

_START = """\
# One supervisor for the whole job; it starts the ranks on every node.
shardwise train "$run_dir/job.yaml" --run-dir "$run_dir" --resume &
supervisor=$!
"""

_WAIT = """\
[ -z "$was_stopped" ] || kill -USR1 "$$" # the signal came before the supervisor
code=127
while :; do # a signal ends wait early
    was_signalled=''
    if wait "$supervisor"; then
        code=0
    else
        seen=$?
        [ "$seen" = 127 ] || code=$seen # 127 where it had ended already: the wait before has its code
    fi
    [ -n "$was_signalled" ] || break
done
# Ended by USR1: it came before shardwise handled signals, and nothing was begun.
[ "$code$was_stopped" != 138yes ] || code=75
[ "$code" = 75 ] || exit "$code"
"""

_GO_ON = f"""\
# Stopped early and saved: the run continues in the next job of its chain, in this one queued again, or in a new one.
trap '' USR1
trap - TERM
next=$(sed -n "/^$job\\$/{{n;p;}}" "$run_dir/{CHAIN_FILE}" 2>/dev/null || :)
if [ -n "$next" ] && [ -n "$(squeue --noheader --jobs="$next" --format=%i 2>/dev/null || :)" ]; then
    echo "job $next continues this run"
    exit 0
fi
# If Slurm is ending the job, the job's output has the reason. There is none for scancel: requeueing would restart a
# cancelled job.
running=$(squeue --noheader --jobs="$job" --states=RUNNING --format=%i 2>/dev/null) || running=unknown
if [ -z "$running" ] && ! tail -n 200 "/proc/$$/fd/1" 2>/dev/null | grep -q "JOB $SLURM_JOB_ID ON .* DUE TO "; then
    echo "cancelled; to continue this run: sbatch $script"
    exit "$code"
fi
if reply=$(scontrol requeue "$job" 2>&1); then
    sleep 300 # Slurm ends this script
    exit "$code"
fi
case $reply in
*pending*) exit "$code" ;; # Slurm has queued it again itself
esac
echo "$reply; a new job continues this run"
"""

_FOLLOW_UP = """\
for name in "${!SLURM_@}"; do # variables of this job are not for the next
    [ "$name" = SLURM_CONF ] || unset "$name"
done
"""

_INSIDE = """\
# The same command on every node, inside the container, where there is no Slurm: node 0 supervises, the others connect
# to it. USR1 is ignored there until shardwise handles it, so it is sent every ten seconds.
# shellcheck disable=SC2016 # for the shell inside
inside='trap "" USR1
exec shardwise train "$1/job.yaml" --run-dir "$1" --resume \\
    --nodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" --head "$2"'
head=${SLURMD_NODENAME:-$(hostname)}:$((20000 + SLURM_JOB_ID % 10000))
"""

_AFTER_START = """\
supervisor=$!
repeating=''
repeat() { while sleep 10 && kill -USR1 "$supervisor" 2>/dev/null; do :; done; }
trap 'forward; [ -n "$repeating" ] || { repeating=yes; repeat & }' USR1 TERM
"""

_FIND_APPTAINER = """\
apptainer=$(command -v apptainer || command -v singularity) || {
    echo "neither apptainer nor singularity is on $(hostname); name their module in slurm.modules" >&2
    exit 4
}
"""


def script_body(
    *,
    run_dir: str,
    workdir: str,
    script: str,
    program_dir: str,
    is_array: bool,
    modules: Sequence[str] = (),
    container: Container | None = None,
    is_offline: bool = False,
    scratch: str | None = None,
) -> str:
    """Everything below the `#SBATCH` lines."""
    surroundings = _surroundings(None if container else program_dir, modules, is_offline=is_offline, scratch=scratch)
    start = _START if container is None else _container_start(container, workdir)
    parts = [_names(run_dir, script, is_array=is_array), _SIGNALS, _RECORD, surroundings, start, _WAIT, _GO_ON]
    array = '--array="$point" ' if is_array else ""
    last = f'{_FOLLOW_UP}sbatch {array}--dependency="afterany:$job" "$script"\n'
    return "\n".join([*filter(None, parts), last])


def _names(run_dir: str, script: str, *, is_array: bool) -> str:
    lines = ["set -eu", "", f"script={shlex.quote(script)}"]
    if not is_array:
        return "\n".join([*lines, f"run_dir={shlex.quote(run_dir)}", "job=$SLURM_JOB_ID", ""])
    return "\n".join(
        [
            *lines,
            "point=$SLURM_ARRAY_TASK_ID",
            f'run_dir={shlex.quote(run_dir)}/point-"$point"',
            "job=${SLURM_ARRAY_JOB_ID}_$point # the plain id of the last point is that of the whole array",
            "",
        ]
    )


def _surroundings(program_dir: str | None, modules: Sequence[str], *, is_offline: bool, scratch: str | None) -> str:
    lines = []
    if modules:
        lines += ["set +u # module reads what is not set", f"module load {shlex.join(modules)}", "set -u"]
    if program_dir is not None:
        lines += [f'export PATH={shlex.quote(program_dir)}:"$PATH"']
    if is_offline:
        lines += ["# Compute nodes have no network (slurm.network).", "export HF_HUB_OFFLINE=1 WANDB_MODE=offline"]
    if scratch is not None:
        caches = " ".join(
            f"{name}={shlex.quote(f'{scratch}/{folder}')}"
            for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor"))
        )
        lines += ["# Kernels compiled at run time stay on the node's own disk (folders.scratch).", f"export {caches}"]
    return "\n".join([*lines, ""]) if lines else ""


def _container_start(container: Container, workdir: str) -> str:
    options, before = srun_parts(container, workdir=workdir)
    srun = [
        'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --input=none --export=ALL',
        '--cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --mem=0',
        *filter(None, (" ".join(options), " ".join(before))),
        'sh -c "$inside" shardwise "$run_dir" "$head" &',
    ]
    find = _FIND_APPTAINER if container.runtime is Runtime.APPTAINER else ""
    return find + _INSIDE + " \\\n    ".join(srun) + "\n" + _AFTER_START
