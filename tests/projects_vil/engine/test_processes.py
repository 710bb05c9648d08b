"""Runs of several processes on the CPU: the losses of one process, and one ending for all, whatever happens to one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from detectron2.utils import comm

from backbones import InputError
from projects_vil.engine import Trainer, training_parser
from projects_vil.engine.processes import check_processes, number_of_processes, share_statistics
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.engine.test_resuming import RUN, assert_same_file, metrics, train
from tests.projects_vil.helpers import CONFIGS, PATIENCE, ROOT, SMALL, small_config

LAUNCH = ["--num-gpus", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LONG = ["SOLVER.MAX_ITER", "4000", "SOLVER.CHECKPOINT_PERIOD", "1", "TEST.EVAL_PERIOD", "0"]
LONG += ["SOLVER.CHECKPOINT_KEEP", "2"]


# -- equal to one process --------------------------------------------------------------------------


def losses_of(output, normalizer, *overrides):
    """A run of two iterations whose loss normaliser stays at ``normalizer``, on images of one size: a batch is padded
    to its largest, and the halves of one are padded less.
    """
    options = ["SOLVER.IMS_PER_BATCH", "4", "SOLVER.MAX_ITER", "2", "DATASETS.TEST", "()", "TEST.BEST_METRIC", ""]
    options += ["MODEL.TRANSFORMER.DROP_PATH", "0.0", "DATALOADER.ASPECT_RATIO_GROUPING", "False"]
    options += ["INPUT.CROP.ENABLED", "True", "INPUT.CROP.TYPE", "absolute", "INPUT.CROP.SIZE", "[48, 48]"]
    options += ["INPUT.MIN_SIZE_TRAIN", "(48,)", "SOLVER.CHECKPOINT_PERIOD", "9"]
    cfg = small_config("retinanet", *RUN, *options, "OUTPUT_DIR", str(output), *overrides)
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


@pytest.mark.parametrize("variant", ["vil_tiny_1_1_3_1_rpb", pytest.param("performer_tiny", marks=pytest.mark.slow)])
def test_two_processes_have_the_losses_of_one(shapes, tmp_path, variant):
    """Each of the two has half of the batch, and so half of the positive anchors that its loss is divided by."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    losses_of(tmp_path / "one", 60.0, "MODEL.TRANSFORMER.NAME", variant)
    in_processes(2, losses_of, tmp_path / "two", 30.0, "MODEL.TRANSFORMER.NAME", variant, store=tmp_path / "store")
    one, two = (torch.load(tmp_path / name / "values.pth", weights_only=True) for name in ("one", "two"))
    torch.testing.assert_close(two["losses"], one["losses"], rtol=2e-6, atol=0)
    # A step of AdamW is near the rate of 1e-3 however small a gradient is, and so however large its rounding.
    for name, tensor in one["model"].items():
        assert (two["model"][name] - tensor).abs().max() < 1e-4, name


def _statistics(folder):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model(torch.full((4, 2), float(comm.get_rank())) + torch.rand(4, 2))
    share_statistics(model)
    torch.save(model[1].state_dict(), folder / f"{comm.get_rank()}.pth")


def test_all_evaluate_with_the_statistics_that_are_saved(tmp_path):
    in_processes(2, _statistics, tmp_path, store=tmp_path / "store")
    first, second = (torch.load(tmp_path / f"{rank}.pth", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


def _cut_off_and_resumed(output, *overrides):
    for iteration in (1, 5, 6):
        train("retinanet", output, *overrides, cut_at=iteration)
    train("retinanet", output, *overrides)


@pytest.mark.slow
def test_two_processes_that_were_cut_off_end_as_two_that_were_not(shapes, tmp_path):
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    in_processes(2, train, "retinanet", tmp_path / "whole", store=tmp_path / "whole" / "store")
    in_processes(2, _cut_off_and_resumed, tmp_path / "cut", store=tmp_path / "cut" / "store")
    for name in ("model_0000002", "model_0000005", "model_final"):
        assert_same_file(tmp_path / f"whole/{name}.pth", tmp_path / f"cut/{name}.pth")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


# -- what can be asked for -------------------------------------------------------------------------


def environment_of_torchrun(monkeypatch, **others):
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in (values | {"MASTER_PORT": "29500"} | others).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_torchrun_says_how_many(monkeypatch):
    args = training_parser("Train.").parse_args([])
    assert number_of_processes(args) == 1
    environment_of_torchrun(monkeypatch)
    assert number_of_processes(args) == 4
    check_processes(args, device="cpu")


@pytest.mark.parametrize(
    "arguments, device, environment, message",
    [
        ("--num-gpus 2", "cpu", {}, "torchrun has started 4 processes: leave out --num-gpus and --num-machines"),
        ("", "cuda:0", {}, "MODEL.DEVICE is cuda:0: with several processes it is cuda, each has its own"),
        ("", "cpu", {"MASTER_ADDR": None}, "RANK is set, as by torchrun, and MASTER_ADDR is not"),
        ("", "cpu", {"RANK": "first"}, "the environment has RANK=first, LOCAL_RANK=0"),
    ],
)
def test_what_torchrun_cannot_have_started(monkeypatch, arguments, device, environment, message):
    args = training_parser("Train.").parse_args(arguments.split())
    environment_of_torchrun(monkeypatch, **environment)
    with pytest.raises(InputError) as caught:
        check_processes(args, device=device)
    assert str(caught.value).startswith(message)


# -- whatever happens to one -----------------------------------------------------------------------


class Run:
    """``tools/train_net.py`` in a session of its own, by a launcher or by its own arguments."""

    def __init__(self, output, datasets_root, *overrides, launcher=(sys.executable,)):
        self.output = output
        command = [*launcher, "tools/train_net.py", "--config-file", str(CONFIGS["retinanet"])]
        command += [*SMALL["retinanet"], *RUN, "OUTPUT_DIR", str(output), *overrides]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DETECTRON2_DATASETS": str(datasets_root)}
        # To a file, which a process that outlives the first does not keep open for the reader.
        self.said = output.with_suffix(".said")
        with self.said.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for(self, text_or_path):
        deadline = time.monotonic() + PATIENCE
        while text_or_path not in self.said.read_text() if isinstance(text_or_path, str) else not text_or_path.exists():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.05)

    def end(self, seconds=60):
        """Its status and what it said; nothing of it is left."""
        try:
            status = self.process.wait(seconds)
        finally:
            left = self.processes()
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                left = []
        # Those of torch end with the processes that they are of; workers of one that was killed when they notice.
        assert not [command for command in left if "--eval-only" in command and "spawn_main" in command], left
        return status, self.said.read_text()

    def processes(self):
        return [command for _, _, command in processes_of(self.process.pid)]

    def ranks(self):
        """The process ids of those that train."""
        return [
            pid
            for pid, parent, command in processes_of(self.process.pid)
            if parent == self.process.pid and ("spawn_main" in command or "train_net" in command)
        ]

    def workers(self):
        ranks = self.ranks()
        return [pid for pid, parent, _ in processes_of(self.process.pid) if parent in ranks]


def processes_of(session):
    """Id, parent's id and command of each process of a session, and of what came from it: torchrun starts others."""
    found, ours = [], {session}
    # A child has a larger id than its parent, but for a wrap of the numbers.
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            state, parent, _, of = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (path / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if (int(of) == session or int(parent) in ours) and state != "Z":
            ours.add(int(path.name))
            found.append((int(path.name), int(parent), command))
    return found


@pytest.fixture(scope="module")
def whole_run(made_once, datasets_root):
    """OUTPUT_DIR of two processes that were not disturbed."""

    def fill(folder):
        status, said = Run(folder / "run", datasets_root, *LAUNCH).end(PATIENCE)
        assert status == 0, said

    return made_once("run_of_two_processes", fill) / "run"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(sys.executable, *()), TORCHRUN], ids=["launch", "torchrun"])
def test_a_signal_to_the_first_process_saves_in_all(launcher, datasets_root, tmp_path):
    flags = LAUNCH if len(launcher) == 1 else []
    run = Run(tmp_path / "run", datasets_root, *LONG, *flags, launcher=launcher)
    run.wait_for(run.output / "last_checkpoint")
    run.process.send_signal(signal.SIGTERM)
    status, said = run.end()
    assert "SIGTERM: saved after iteration" in said
    if flags:
        assert status == 128 + signal.SIGTERM
        assert "Traceback" not in said and "error:" not in said
    assert not (run.output / ".run.lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes_saves_once(number, datasets_root, tmp_path):
    run = Run(tmp_path / "run", datasets_root, *LONG, *LAUNCH, "DATALOADER.NUM_WORKERS", "1")
    run.wait_for(run.output / "last_checkpoint")
    os.killpg(run.process.pid, number)
    status, said = run.end()
    assert status == 128 + number, said
    assert said.count("saved after iteration") == 1 and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("flags", [[], LAUNCH], ids=["one", "two"])
def test_a_signal_ends_an_evaluation_at_once(number, flags, datasets_root, tmp_path, whole_run):
    slow = ["DATALOADER.NUM_WORKERS", "2", "TEST.EVAL_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "5"]
    run = Run(tmp_path / "run", datasets_root, *LONG, *slow, *flags)
    run.wait_for("Start inference on")
    os.killpg(run.process.pid, number)
    status, said = run.end()
    assert status == 128 + number, said
    assert "Traceback" not in said
    assert f"{number.name}: saved after iteration" in said
    weights = ["--eval-only", "MODEL.WEIGHTS", str(whole_run / "model_final.pth"), "DATALOADER.NUM_WORKERS", "2"]
    run = Run(tmp_path / "judged", datasets_root, *weights, *flags)
    run.wait_for("Start inference on")
    os.killpg(run.process.pid, number)
    status, said = run.end()
    assert status == 128 + number, said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("which", ["rank", "worker", "parent"])
def test_a_process_that_is_killed_ends_the_run_with_its_reason(which, datasets_root, tmp_path):
    run = Run(tmp_path / "run", datasets_root, *LONG, *LAUNCH, "DATALOADER.NUM_WORKERS", "1")
    run.wait_for(run.output / "last_checkpoint")
    victim = {"rank": run.ranks()[-1:], "worker": run.workers()[-1:], "parent": [run.process.pid]}[which]
    os.kill(*victim, signal.SIGKILL)
    if which == "parent":
        run.process.wait()
        deadline = time.monotonic() + 60
        while run.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not run.processes()
        assert "SIGTERM: saved after iteration" in run.said.read_text()
        return
    status, said = run.end()
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    if which == "rank":
        assert last == "error: process 1 of 2 was killed by SIGKILL (signal 9), often for want of memory"
        assert status == 128 + signal.SIGKILL
    else:
        assert last == (
            "error: a data loading process was killed by SIGKILL (signal 9), often for want of memory: fewer "
            "DATALOADER.NUM_WORKERS"
        )
        assert status == 1


@pytest.mark.slow
def test_a_killed_group_resumes_to_the_bit(datasets_root, tmp_path, whole_run):
    run = Run(tmp_path / "run", datasets_root, *LAUNCH)
    run.wait_for(run.output / "model_0000002.pth")
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
    status, said = Run(tmp_path / "run", datasets_root, *LAUNCH, "--resume").end(PATIENCE)
    assert status == 0, said
    for name in ("model_0000005", "model_final"):
        assert_same_file(whole_run / f"{name}.pth", tmp_path / f"run/{name}.pth")
    assert metrics(whole_run) == metrics(tmp_path / "run")


@pytest.mark.slow
def test_a_killed_rank_comes_back_under_torchrun(datasets_root, tmp_path, whole_run):
    launcher = [*TORCHRUN, "--max-restarts", "2"]
    run = Run(tmp_path / "run", datasets_root, "--resume", launcher=launcher)
    run.wait_for(run.output / "model_0000002.pth")
    os.kill(run.ranks()[-1], signal.SIGKILL)
    status, said = run.end(PATIENCE)
    assert status == 0, said
    assert_same_file(whole_run / "model_final.pth", tmp_path / "run/model_final.pth")
    assert metrics(whole_run) == metrics(tmp_path / "run")


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_and_an_evaluation_is_not(datasets_root, tmp_path, whole_run):
    run = Run(tmp_path / "run", datasets_root, *LONG, *LAUNCH)
    run.wait_for(run.output / "last_checkpoint")
    weights = ["--eval-only", "MODEL.WEIGHTS", str(whole_run / "model_final.pth")]
    try:
        for flags, refused in (([], True), (["--resume", *LAUNCH], True), (weights, False)):
            other = Run(tmp_path / "other", datasets_root, *LONG, *flags, "OUTPUT_DIR", str(run.output))
            status, said = other.end(PATIENCE)
            assert ("is in use by process" in said and status == 1) == refused, said
    finally:
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(sys.executable, *()), TORCHRUN], ids=["launch", "torchrun"])
def test_what_cannot_be_is_said_once(launcher, datasets_root, tmp_path):
    flags = LAUNCH if len(launcher) == 1 else []
    odd = ["SOLVER.IMS_PER_BATCH", "3"]
    status, said = Run(tmp_path / "run", datasets_root, *odd, *flags, launcher=launcher).end(PATIENCE)
    assert status == 1
    assert said.count("error: SOLVER.IMS_PER_BATCH is 3, no multiple of 2 processes") == 1
