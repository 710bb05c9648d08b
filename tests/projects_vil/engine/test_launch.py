"""Runs of several processes on the CPU: they have the losses of one process, and end together."""

import contextlib
import os
import signal

import pytest
import torch
from detectron2.utils import comm
from torch.multiprocessing import ProcessRaisedException

from backbones import ConfigError
from projects_vil.engine import Trainer
from projects_vil.engine.launch import Processes, launch
from projects_vil.engine.trainer import share_statistics
from tests.projects_vil import helpers
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.engine.test_resuming import RUN, assert_same_run
from tests.projects_vil.forked import fork_processes
from tests.projects_vil.helpers import CONFIGS, PATIENCE, ROOT, SMALL, error_line, last_child, run_python, run_tool

LAUNCH = ["--num-gpus", "2"]
TORCHRUN = ["--standalone", "--nproc-per-node", "2"]
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
    cfg = helpers.small_config("retinanet", *RUN, *options, "OUTPUT_DIR", str(output))
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


def test_all_processes_evaluate_with_the_saved_statistics(tmp_path):
    in_processes(2, _statistics, tmp_path, store=tmp_path / "store")
    first, second = (torch.load(tmp_path / f"{rank}.pth", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


# -- numbers of processes -------------------------------------------------------------------------


def check(device="cpu", **changes) -> int:
    return Processes(device, **changes).world_size


TORCHRUN_SETS = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
    "MASTER_PORT": "29500",
}


def test_the_number_of_processes(monkeypatch):
    assert check(num_gpus=2, num_machines=3, dist_url="tcp://localhost:29500") == 6
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


class Run:
    """A process of ``tools/train_net.py``. It is forked, and so are the processes that it or torchrun starts."""

    def __init__(self, output, datasets_root, *overrides, detector="retinanet", **options):
        self.output, self.folder = output, output.with_suffix(".log")
        self.folder.mkdir()
        for name in ("stdout", "stderr"):
            (self.folder / name).touch()
        words = ["--config-file", CONFIGS[detector], *SMALL[detector], *RUN, "OUTPUT_DIR", output, *overrides]
        options |= {"folder": self.folder, "datasets_root": datasets_root}
        self.process = helpers.start_tool("train_net.py", *words, **options)

    @property
    def log(self):
        return "".join((self.folder / name).read_text() for name in ("stdout", "stderr"))

    def wait_for(self, expected):
        """Wait for a text in the log, or for a path."""
        found = (lambda: expected in self.log) if isinstance(expected, str) else expected.exists
        helpers.wait_for(lambda: found() or not self.process.is_alive())
        assert self.process.is_alive(), self.log

    def end(self, seconds=60):
        """Return the exit status and the output."""
        self.process.join(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.exitcode, self.log


@pytest.fixture(scope="module")
def whole_run(made_once, datasets_root):
    """Return OUTPUT_DIR of an uninterrupted run with two processes, which are spawned as outside of the tests."""

    def fill(folder):
        words = ["--config-file", CONFIGS["retinanet"], *SMALL["retinanet"], *RUN, "OUTPUT_DIR", folder / "run"]
        result = run_python(ROOT / "tools/train_net.py", *LAUNCH, *words, datasets_root=datasets_root)
        assert result.returncode == 0, result.stderr

    return made_once("run_of_two_processes", fill) / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, flags, torchrun, to_all",
    [(signal.SIGTERM, LAUNCH, None, False), (signal.SIGTERM, [], TORCHRUN, False), (signal.SIGHUP, LAUNCH, None, True)],
    ids=["first of two", "torchrun", "both of two"],
)
def test_a_signal_saves_one_checkpoint(number, flags, torchrun, to_all, datasets_root, tmp_path):
    run = Run(tmp_path / "run", datasets_root, *LONG, *flags, "DATALOADER.NUM_WORKERS", "1", torchrun=torchrun)
    run.wait_for(run.output / "last_checkpoint")
    (os.killpg if to_all else os.kill)(run.process.pid, number)
    status, log = run.end()
    assert log.count("saved after iteration") == 1 and not (run.output / ".run.lock").exists(), log
    # torchrun has its own status and prints a traceback.
    assert torchrun or (status == 128 + number and "Traceback" not in log), log
    assert torchrun or log.count("The run saves a checkpoint after this iteration") == 1, log
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
def test_the_other_processes_save_if_the_first_is_killed(datasets_root, tmp_path):
    run = Run(tmp_path / "run", datasets_root, *LONG, *LAUNCH)
    run.wait_for(run.output / "last_checkpoint")
    run.process.kill()
    helpers.wait_for(lambda: not (run.output / ".run.lock").exists())
    assert "saved after iteration" in run.log


def refuse() -> None:
    if comm.get_rank() == 1:
        raise RuntimeError("Connection refused")
    comm.synchronize()


@pytest.mark.slow
def test_an_error_of_a_process_keeps_its_traceback(monkeypatch):
    """Also if the text of the error looks like a lost connection."""
    monkeypatch.setattr("projects_vil.engine.launch.start_processes", fork_processes)
    with pytest.raises(ProcessRaisedException, match="(?s)in refuse.*RuntimeError: Connection refused"):
        launch(refuse, Processes("cpu", num_gpus=2))


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process(datasets_root, tmp_path, whole_run):
    run = Run(tmp_path / "run", datasets_root, "--resume", torchrun=[*TORCHRUN, "--max-restarts", "2"])
    run.wait_for(run.output / "model_0000002.pth")
    os.kill(last_child(run.process.pid), signal.SIGKILL)
    status, log = run.end(PATIENCE)
    assert status == 0, log
    assert "has no run to resume" in log
    assert_same_run(whole_run, tmp_path / "run")


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_and_an_evaluation_is_not(datasets_root, tmp_path, whole_run):
    run = Run(tmp_path / "run", datasets_root, *LONG)
    run.wait_for(run.output / "last_checkpoint")
    weights = ["--eval-only", "MODEL.WEIGHTS", str(whole_run / "model_final.pth")]
    try:
        for flags, refused in ((["--resume"], True), (weights, False)):
            other = Run(tmp_path / flags[0], datasets_root, *LONG, *flags, "OUTPUT_DIR", run.output)
            status, log = other.end(PATIENCE)
            assert (str(run.output) in log.splitlines()[-1] and status == 1) == refused, log
    finally:
        run.process.terminate()
        run.process.join(60)


@pytest.mark.slow
def test_a_mistake_is_reported_once(datasets_root, tmp_path):
    """Images are missing, which is found before the processes start, or by the processes of torchrun."""
    file = f"{datasets_root}/shapes/annotations/instances_val.json"
    missing = ["DATASETS.COCO", f"[['absent', '{file}', '{tmp_path}']]", "DATASETS.TRAIN", "('absent',)"]
    odd = ["SOLVER.IMS_PER_BATCH", "3"]
    words = ["--config-file", CONFIGS["retinanet"], *SMALL["retinanet"], "OUTPUT_DIR", tmp_path / "run"]
    for flags, named in ((missing, str(tmp_path)), (odd, "SOLVER.IMS_PER_BATCH")):
        result = run_tool("train_net.py", *words, *flags, *LAUNCH, datasets_root=datasets_root)
        assert named in error_line(result) and not (tmp_path / "run").exists()
    torchrun = ["-m", "torch.distributed.run", *TORCHRUN, ROOT / "tools/train_net.py"]
    result = run_python(*torchrun, *words, *missing, datasets_root=datasets_root)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 1 and str(tmp_path) in line and not (tmp_path / "run").exists()
