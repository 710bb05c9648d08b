"""Runs of several processes on the CPU: they have the losses of one process, and end together."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from detectron2.utils import comm
from torch.multiprocessing import ProcessRaisedException

from backbones import ConfigError
from projects_vil.engine import Trainer
from projects_vil.engine.launch import Processes, launch
from projects_vil.engine.trainer import share_statistics
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.engine.test_resuming import RUN, assert_same_run
from tests.projects_vil.helpers import CONFIGS, PATIENCE, ROOT, SMALL, last_child, small_config

LAUNCH = ["--num-gpus", "2"]
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LONG = ["SOLVER.MAX_ITER", "4000", "SOLVER.CHECKPOINT_PERIOD", "1", "TEST.EVAL_PERIOD", "0"]
LONG += ["SOLVER.CHECKPOINT_MAX_TO_KEEP", "2"]


# -- equal to one process --------------------------------------------------------------------------


def losses_of(output, normalizer):
    """A run of two iterations whose loss normaliser stays at ``normalizer``, on images of one size: a batch is padded
    to its largest, and the halves of one are padded less.
    """
    options = ["SOLVER.IMS_PER_BATCH", "4", "SOLVER.MAX_ITER", "2", "DATASETS.TEST", "()", "TEST.BEST_METRIC", ""]
    options += ["MODEL.TRANSFORMER.DROP_PATH", "0.0", "DATALOADER.ASPECT_RATIO_GROUPING", "False"]
    options += ["INPUT.CROP.ENABLED", "True", "INPUT.CROP.TYPE", "absolute", "INPUT.CROP.SIZE", "[48, 48]"]
    options += ["INPUT.MIN_SIZE_TRAIN", "(48,)", "SOLVER.CHECKPOINT_PERIOD", "9"]
    cfg = small_config("retinanet", *RUN, *options, "OUTPUT_DIR", str(output))
    torch.manual_seed(cfg.SEED)
    trainer = Trainer(cfg)
    model = getattr(trainer.model, "module", trainer.model)

    def stays(name, value, initial_value):
        setattr(model, name, normalizer)
        return normalizer

    model._ema_update = stays
    values = []
    step = trainer.run_step

    def run_step():
        step()
        if comm.is_main_process():
            values.append([trainer.storage.latest()[name][0] for name in ("loss_cls", "loss_box_reg")])

    trainer.run_step = run_step
    trainer.train()
    if comm.is_main_process():
        torch.save({"losses": torch.tensor(values), "model": model.state_dict()}, output / "values.pth")


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(shapes, tmp_path):
    """Each of two processes has half of the batch, and its loss is divided by half of the positive anchors."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    losses_of(tmp_path / "one", 60.0)
    in_processes(2, losses_of, tmp_path / "two", 30.0, store=tmp_path / "store")
    one, two = (torch.load(tmp_path / name / "values.pth", weights_only=True) for name in ("one", "two"))
    torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-3, atol=0)
    # A step of AdamW is near the rate of 1e-3 however small a gradient is, so rounding may turn a few of them.
    for name, tensor in one["model"].items():
        assert (two["model"][name] - tensor).abs().float().mean() < 2e-4, name


def _statistics(folder):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model(torch.full((4, 2), float(comm.get_rank())) + torch.rand(4, 2))
    share_statistics(model)
    torch.save(model[1].state_dict(), folder / f"{comm.get_rank()}.pth")


def test_all_evaluate_with_the_statistics_that_are_saved(tmp_path):
    in_processes(2, _statistics, tmp_path, store=tmp_path / "store")
    first, second = (torch.load(tmp_path / f"{rank}.pth", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


# -- numbers of processes -------------------------------------------------------------------------


def check(device="cpu", **changes) -> int:
    processes = Processes(**changes)
    processes.check(device)
    return processes.world_size


TORCHRUN_SETS = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
    "MASTER_PORT": "29500",
}


def test_the_number_of_processes(monkeypatch):
    assert check(num_gpus=2, num_machines=3, dist_url="tcp://first:29500") == 6
    for name, value in TORCHRUN_SETS.items():
        monkeypatch.setenv(name, value)
    assert check() == 4


@pytest.mark.parametrize(
    "changes, environment, named",
    [
        ({"num_gpus": 0}, {}, "--num-gpus is 0"),
        ({"machine_rank": 1}, {}, "--machine-rank"),
        ({"num_gpus": 2, "device": "cpu:0"}, {}, "cpu:0"),
        ({"num_gpus": 2}, TORCHRUN_SETS, "--num-gpus"),
        ({"device": "cuda:0"}, TORCHRUN_SETS, "cuda:0"),
        ({}, TORCHRUN_SETS | {"RANK": "first"}, "RANK"),
    ],
)
def test_processes_that_cannot_run(monkeypatch, changes, environment, named):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=named):
        check(**changes)


# -- signals and killed processes --------------------------------------------------------------------


def _default_signals():
    """Restore signals that are ignored in a background job or under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Run:
    """Start ``tools/train_net.py`` in a separate session, with a launcher or with its own arguments."""

    def __init__(self, output, datasets_root, *overrides, launcher=PYTHON):
        self.output = output
        command = [*launcher, "tools/train_net.py", "--config-file", str(CONFIGS["retinanet"])]
        command += [*SMALL["retinanet"], *RUN, "OUTPUT_DIR", str(output), *overrides]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DETECTRON2_DATASETS": str(datasets_root)}
        # To a file, which a process that outlives the first does not keep open for the reader.
        self.log = output.with_suffix(".log")
        with self.log.open("w") as file:
            options = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, preexec_fn=_default_signals, **options)

    def wait_for(self, text_or_path):
        deadline = time.monotonic() + PATIENCE
        while text_or_path not in self.log.read_text() if isinstance(text_or_path, str) else not text_or_path.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def end(self, seconds=60):
        """Return the exit status and the output."""
        try:
            return self.process.wait(seconds), self.log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def whole_run(made_once, datasets_root):
    """Return OUTPUT_DIR of an uninterrupted run with two processes."""

    def fill(folder):
        status, log = Run(folder / "run", datasets_root, *LAUNCH).end(PATIENCE)
        assert status == 0, log

    return made_once("run_of_two_processes", fill) / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, flags, launcher, to_all",
    [
        (signal.SIGTERM, LAUNCH, PYTHON, False),
        (signal.SIGTERM, [], TORCHRUN, False),
        (signal.SIGHUP, LAUNCH, PYTHON, True),
    ],
    ids=["first of two", "torchrun", "both of two"],
)
def test_a_signal_saves_once_in_all(number, flags, launcher, to_all, datasets_root, tmp_path):
    run = Run(tmp_path / "run", datasets_root, *LONG, *flags, "DATALOADER.NUM_WORKERS", "1", launcher=launcher)
    run.wait_for(run.output / "last_checkpoint")
    os.killpg(run.process.pid, number) if to_all else run.process.send_signal(number)
    status, log = run.end()
    assert log.count("saved after iteration") == 1 and not (run.output / ".run.lock").exists(), log
    # torchrun has its own status and prints a traceback.
    assert launcher is TORCHRUN or (status == 128 + number and "Traceback" not in log), log
    assert launcher is TORCHRUN or log.count("The run saves a checkpoint after this iteration") == 1, log
    last = torch.load(run.output / (run.output / "last_checkpoint").read_text(), weights_only=True)
    assert last["iteration"] == int(log.partition("saved after iteration ")[2].partition(";")[0])


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_at_once(datasets_root, tmp_path, whole_run):
    slow = ["DATALOADER.NUM_WORKERS", "2", "TEST.EVAL_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "5"]
    weights = ["--eval-only", "MODEL.WEIGHTS", str(whole_run / "model_final.pth"), "DATALOADER.NUM_WORKERS", "2"]
    for folder, overrides in (("run", [*LONG, *slow]), ("evaluated", weights)):
        run = Run(tmp_path / folder, datasets_root, *overrides, *LAUNCH)
        run.wait_for("Start inference on")
        os.killpg(run.process.pid, signal.SIGINT)
        status, log = run.end()
        assert status == 128 + signal.SIGINT and "Traceback" not in log, log
        assert ("saved after iteration" in log) == (folder == "run")


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_with_its_reason(datasets_root, tmp_path):
    run = Run(tmp_path / "run", datasets_root, *LONG, *LAUNCH)
    run.wait_for(run.output / "last_checkpoint")
    os.kill(last_child(run.process.pid), signal.SIGKILL)
    status, log = run.end(PATIENCE)
    last = log.splitlines()[-1]
    assert last.startswith("error: Process 1 of 2") and "SIGKILL" in last and status == 128 + signal.SIGKILL


@pytest.mark.slow
def test_all_save_when_the_first_process_is_killed(datasets_root, tmp_path):
    run = Run(tmp_path / "run", datasets_root, *LONG, *LAUNCH)
    run.wait_for(run.output / "last_checkpoint")
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + PATIENCE
    while (run.output / ".run.lock").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "saved after iteration" in run.log.read_text()


def refuse() -> None:
    if comm.get_rank() == 1:
        raise RuntimeError("Connection refused")
    comm.synchronize()


@pytest.mark.slow
def test_an_error_of_a_process_keeps_its_traceback():
    """Also if the text of the error looks like a lost connection."""
    with pytest.raises(ProcessRaisedException, match="(?s)in refuse.*RuntimeError: Connection refused"):
        launch(refuse, (), Processes(num_gpus=2), device="cpu")


@pytest.mark.slow
def test_a_killed_rank_comes_back_under_torchrun(datasets_root, tmp_path, whole_run):
    launcher = [*TORCHRUN, "--max-restarts", "2"]
    run = Run(tmp_path / "run", datasets_root, "--resume", launcher=launcher)
    run.wait_for(run.output / "model_0000002.pth")
    os.kill(last_child(run.process.pid), signal.SIGKILL)
    status, log = run.end(PATIENCE)
    assert status == 0, log
    assert "has no checkpoint" in log
    assert_same_run(whole_run, tmp_path / "run")


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_and_an_evaluation_is_not(datasets_root, tmp_path, whole_run):
    run = Run(tmp_path / "run", datasets_root, *LONG)
    run.wait_for(run.output / "last_checkpoint")
    weights = ["--eval-only", "MODEL.WEIGHTS", str(whole_run / "model_final.pth")]
    try:
        for flags, refused in ((["--resume"], True), (weights, False)):
            other = Run(tmp_path / "other", datasets_root, *LONG, *flags, "OUTPUT_DIR", str(run.output))
            status, log = other.end(PATIENCE)
            assert (str(run.output) in log.splitlines()[-1] and status == 1) == refused, log
    finally:
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [PYTHON, TORCHRUN], ids=["launch", "torchrun"])
def test_a_mistake_is_reported_once(launcher, datasets_root, tmp_path):
    """Images are missing, which is found before the processes start, or by the processes."""
    flags = LAUNCH if launcher is PYTHON else []
    file = f"{datasets_root}/shapes/annotations/instances_val.json"
    missing = ["DATASETS.COCO", f"[['mine', '{file}', '{tmp_path}']]", "DATASETS.TRAIN", "('mine',)"]
    mistakes = [(missing, str(tmp_path)), (["SOLVER.IMS_PER_BATCH", "3"], "SOLVER.IMS_PER_BATCH")]
    for mistake, named in mistakes if launcher is PYTHON else mistakes[:1]:
        status, log = Run(tmp_path / "run", datasets_root, *mistake, *flags, launcher=launcher).end(PATIENCE)
        (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
        assert status == 1 and named in line and (not flags or log.endswith(f"{line}\n")), log
        assert not (tmp_path / "run").exists()
