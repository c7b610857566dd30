"""A secret of the environment is in no file and no line, even where somebody's own code prints it and fails with it."""

from workplace_factory import Workplace

CANARIES = {
    "HF_TOKEN": "hf_canary0123456789abcdefghij",
    "WANDB_API_KEY": "canary-of-wandb-52d1",
    "AWS_SECRET_ACCESS_KEY": "canary-of-aws-9b07",
}
EXTENSION = """
import os
import sys
import warnings

from torch.nn import functional

SECRETS = [os.environ[name] for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")]


def on_step(step, metrics):
    print("signed in with", *SECRETS)
    sys.stderr.write(f"{SECRETS[0]} again\\n")
    warnings.warn(SECRETS[1], stacklevel=1)


def loss(logits, labels):
    if os.path.exists("fail"):
        raise RuntimeError(f"401 for {SECRETS[2]} and {SECRETS[0]}")
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
"""


def test_no_secret_reaches_a_file_or_a_line(workplace: Workplace) -> None:
    place = Workplace(workplace.folder, workplace.environment | CANARIES)
    (place.folder / "mine.py").write_text(EXTENSION)
    place.write_job(extensions="mine.py")
    printed = place.run("train", "job.yaml")
    logs = "".join(path.read_text() for path in place.only_run().glob("attempts/*/logs/*"))
    assert logs.count("signed in with [redacted] [redacted] [redacted]") == 8, "the code ran, and its lines are there"
    (place.folder / "fail").touch()
    failed = place.run("train", "job.yaml", "--debug", check=False)
    assert failed.returncode == 4 and "401 for [redacted] and [redacted]" in failed.stdout + failed.stderr
    told = place.run("report", max((place.folder / "runs").iterdir()))
    outputs = [each.stdout + each.stderr for each in (printed, failed, told)]
    files = [path for path in place.folder.rglob("*") if path.is_file() and path.name != "mine.py"]
    assert len(files) > 30
    for canary in CANARIES.values():
        assert not [path for path in files if canary.encode() in path.read_bytes()]
        assert not any(canary in output for output in outputs)
