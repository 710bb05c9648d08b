"""Runs on two machines: two network namespaces of this machine, or a machine that waits without success."""

import os
import shutil
import signal
import socket
import subprocess

import pytest

from tests.projects_vil.engine.test_launch import LONG, Run
from tests.projects_vil.helpers import PATIENCE, last_child

pytestmark = pytest.mark.slow
HOSTS = ("10.217.98.1", "10.217.98.2")


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def test_a_start_times_out_if_a_machine_is_missing(datasets_root, tmp_path):
    runs = []
    for rank in (0, 1):
        url = f"tcp://localhost:{free_port()}"
        flags = ["--num-machines", "2", "--machine-rank", rank, "--dist-url", url, "--dist-timeout", "12"]
        runs.append((Run(tmp_path / str(rank), datasets_root, *flags), url))
    for run, url in runs:
        status, log = run.end(PATIENCE)
        assert status == 1 and f"waiting for 2 machines at {url}, at most 12 s" in log and "Traceback" not in log, log
        assert f"\nerror: Not all processes connected to {url} within 12 s" in log and not run.output.exists()


def test_a_wrong_host_or_ctrl_c_ends_the_run(datasets_root, tmp_path):
    flags = ["--num-machines", "2", "--machine-rank", "1", "--dist-url"]
    status, log = Run(tmp_path / "wrong", datasets_root, *flags, "tcp://first.invalid:29500").end(PATIENCE)
    assert status == 1 and "first.invalid" in log.splitlines()[-1] and "Traceback" not in log, log
    run = Run(tmp_path / "run", datasets_root, *flags, f"tcp://localhost:{free_port()}")
    run.wait_for("waiting for 2 machines")
    os.killpg(run.process.pid, signal.SIGINT)
    status, log = run.end()
    assert status == 128 + signal.SIGINT and "Traceback" not in log, log


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines(monkeypatch):
    """Return the network namespaces of two machines that can reach only each other."""
    if shutil.which("ip") is None:
        pytest.skip("there is no command ip (iproute2)")
    names, cable = [f"vil-{os.getpid()}-{number}" for number in range(2)], f"vil{os.getpid()}"
    # gloo would take the address that the name of the host has, which is the same on both.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", cable)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable, "netns", names[0], "type", "veth", "peer", "name", cable, "netns", names[1])
        for name, host in zip(names, HOSTS, strict=True):
            for words in (("addr", "add", f"{host}/24", "dev", cable), ("link", "set", cable, "up")):
                ip("-netns", name, *words)
            ip("-netns", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_machines_train_one_model(machines, datasets_root, tmp_path):
    """The second machine starts after the first one has logged that it waits."""
    flags = ["--num-machines", "2", "--dist-url", f"tcp://{HOSTS[0]}:29511", "OUTPUT_DIR", tmp_path / "run"]
    first = Run(tmp_path / "first", datasets_root, *flags, network=machines[0])
    first.wait_for("waiting for 2 machines")
    second = Run(tmp_path / "second", datasets_root, "--machine-rank", "1", *flags, network=machines[1])
    for run in (first, second):
        status, log = run.end(PATIENCE)
        assert status == 0, log
    assert (tmp_path / "run/model_final.pth").exists() and "2 processes" in first.log


def test_two_machines_resume_after_a_process_is_killed(machines, datasets_root, tmp_path):
    """torchrun starts the processes of both again, and they resume from the last checkpoint."""
    runs, overrides = [], [*LONG, "SOLVER.MAX_ITER", "24", "--resume", "OUTPUT_DIR", tmp_path / "run"]
    for number, (machine, host) in enumerate(zip(machines, HOSTS, strict=True)):
        torchrun = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-endpoint", f"{HOSTS[0]}:29512", "--rdzv-id", "two", "--local-addr", host]
        torchrun += ["--rdzv-conf", f"is_host={int(number == 0)}"]
        runs.append(Run(tmp_path / f"run{number}", datasets_root, *overrides, torchrun=torchrun, network=machine))
    runs[0].wait_for(tmp_path / "run/last_checkpoint")
    assert not (tmp_path / "run/model_final.pth").exists()
    os.kill(last_child(runs[1].process.pid), signal.SIGKILL)
    for run in runs:
        status, log = run.end(PATIENCE)
        assert status == 0, log
    assert (tmp_path / "run/model_final.pth").exists()
