"""`shardwise chat`: a subprocess with torch talks through this process's own terminal or pipe.

Ctrl-C reaches both of them: the subprocess decides whether it ends an answer or the program, this one waits for it.
"""

import os
import signal
import subprocess
import sys

from launch.commands.export import check_run
from launch.options import ChatOptions
from launch.terminal import Console
from trainer.spec.errors import EnvironmentFaultError, ExitCode

_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # a user's trainer.py in the working directory must not shadow ours
    "PYTHONWARNINGS": "ignore",  # what libraries say to each other is no part of a talk
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}


def run_chat(options: ChatOptions, _console: Console) -> ExitCode:
    """Talks until the input ends; the exit code of the subprocess, which has said what was wrong."""
    has_export = (options.run_dir / "export").is_dir() and options.checkpoint is None
    if not has_export or not (options.run_dir / "plan.json").is_file():
        check_run(options.run_dir)
    words = ["--max-new-tokens", str(options.max_new_tokens)]
    words += ["--checkpoint", options.checkpoint] if options.checkpoint is not None else []
    words += ["--temperature", str(options.temperature)] if options.temperature is not None else []
    words += [f"--system={options.system}"] if options.system is not None else []
    before = signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which the subprocess would inherit
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.runtime.chat.run", str(options.run_dir), *words],
            env=os.environ | _ENVIRONMENT,
        )
        exit_code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        return ExitCode(exit_code)
    except ValueError:
        raise EnvironmentFaultError(f"chat: the process that held the model ended with {exit_code}") from None
