"""Commands of Slurm that succeed, fail and hang."""

import pytest
from slurm_texts import install_slurm, slurm_text

from shardwise.slurm.queries import read_associations, read_config, read_partitions, read_qos_limits, run_slurm
from shardwise.trainer.spec.errors import EnvironmentFaultError


def program(folder, name, script):
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_commands_are_run_in_plain_english_and_user_text_reaches_no_shell(tmp_path):
    environment = program(tmp_path, "sacctmgr", 'for word; do echo "<$word>"; done; echo "$LC_ALL"')
    text = run_slurm(("sacctmgr", "a b", "$(touch x)", "; rm y"), environment={**environment, "LC_ALL": "de_DE.UTF-8"})
    assert text == "<a b>\n<$(touch x)>\n<; rm y>\nC\n"


def test_a_cluster_with_accounting_answers(tmp_path):
    environment = install_slurm(tmp_path, "aurora")
    config = read_config(environment)
    assert config["AccountingStorageEnforce"] == "associations,limits,qos"
    vision, theory, guests = read_associations("alice", config["ClusterName"], environment)
    assert (vision.account, vision.is_default, vision.default_qos) == ("vision", True, "normal")
    assert vision.qos == ("debug", "long", "normal") and vision.limits.max_time_s == 3 * 86400
    assert (theory.is_default, theory.default_qos) == (False, None) and guests.partition == "cpu"
    assert read_associations("carol", "aurora", environment) == ()
    found = read_qos_limits(("long", "partgpu"), environment)
    assert found["long"].per_job == {"gres/gpu": 16, "node": 2} and found["long"].per_user == {"gres/gpu": 8}
    assert found["partgpu"].per_user == {"gres/gpu": 12} and found.keys() == {"long", "partgpu"}
    assert read_qos_limits(("scavenge",), environment)["scavenge"].is_over_partition
    assert read_qos_limits((), environment) == {}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"echo '{slurm_text('fake_nodes', 'no_controller.txt').strip()}' >&2; exit 1", "controller"),
        ("echo 'scontrol: error: x'; exit 1", "scontrol -o show partition: scontrol: error: x"),
        ("exit 3", "exit code 3"),
    ],
)
def test_failures_name_the_command(tmp_path, script, words):
    environment = program(tmp_path, "scontrol", script)
    with pytest.raises(EnvironmentFaultError) as raised:
        read_partitions(environment)
    assert words in str(raised.value) and "scontrol -o show partition" in str(raised.value)


def test_a_command_that_is_missing_no_program_or_silent_is_an_error(tmp_path):
    with pytest.raises(EnvironmentFaultError, match=r"scontrol .*PATH.*\n.*--hardware"):
        read_partitions({"PATH": str(tmp_path)})
    (tmp_path / "scontrol").write_text("#!/nonexistent\n")
    (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(EnvironmentFaultError, match="scontrol"):
        read_partitions({"PATH": str(tmp_path)})
    environment = program(tmp_path, "scontrol", "exec sleep 60")
    with pytest.raises(EnvironmentFaultError, match=r"scontrol show node: .*0\.2 s"):
        run_slurm(("scontrol", "show", "node"), environment=environment, timeout_s=0.2)
