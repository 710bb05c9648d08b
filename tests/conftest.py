"""Shared fixtures: small datasets, a short training run and exported files."""

import gc
import multiprocessing.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Write temporary files and caches of libraries to pytest's folder, which is deleted at the end."""
    folder = config._tmp_path_factory.getbasetemp() / "tmp"
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")
    tempfile.tempdir = None
    # Files of tests need not survive a power cut. Most are deleted before they are on the disk.
    os.fsync = lambda descriptor: None
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A background job of a shell ignores SIGINT. The tests of Ctrl-C would never end.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection():
    """Disable garbage collections until all test modules are imported."""
    gc.disable()


def pytest_collection_finish():
    """Leave the modules and tests out of later garbage collections, which would take most of their time for them."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    """End multiprocessing before pytest deletes its folder, which has files of the forked tools."""
    for process in multiprocessing.active_children():
        # A tool of a failed test may never end.
        process.kill()
    multiprocessing.util._run_finalizers()


@pytest.fixture(autouse=True)
def unchanged_process():
    """Keep the loggers and signal handlers, and start autograd.

    With several threads, small models take four times as long.
    """
    import torch

    from tests.projects_vil.helpers import loggers_and_signals_as_before

    torch.set_num_threads(1)
    # FakeTensorMode, which torch.export uses, adds a device. If autograd starts afterward, it starts a thread for this
    # device, and a forked process cannot use autograd.
    torch.zeros((), requires_grad=True).backward()
    with loggers_and_signals_as_before():
        yield


@pytest.fixture(scope="session")
def short_ray_folder():
    """Make Ray write to a folder in /tmp, because the path of a socket can have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("RAY_TMPDIR", folder)
            yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return a function (name, fill) -> folder. One test process fills the folder, and all processes share it."""
    base = tmp_path_factory.getbasetemp()
    # Each process of pytest-xdist has a subfolder in the folder of the session.
    base = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made_once"
    base.mkdir(exist_ok=True)

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with FileLock(base / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return make


def _datasets_root(name: str, **options):
    """Return a fixture: a folder for ``DETECTRON2_DATASETS`` with a dataset of small images. All have objects."""

    @pytest.fixture(scope="session")
    def datasets_root(made_once):
        from examples.make_shapes_dataset import write_shapes_dataset

        return made_once(name, lambda root: write_shapes_dataset(root / name, short_side=64, **options))

    return datasets_root


datasets_root = _datasets_root("shapes", num_train=16, num_val=8)
sem_seg_root = _datasets_root("shapes_sem_seg", task="sem_seg", num_train=8, num_val=6)
panoptic_root = _datasets_root("shapes_panoptic", task="panoptic", num_train=8, num_val=4)


def _registered(name: str, root_fixture: str, detector: str):
    """Return a fixture: the folder of a registered dataset, with ``DETECTRON2_DATASETS`` set to its parent."""

    @pytest.fixture
    def dataset(request, monkeypatch):
        from projects_vil.data import register_datasets
        from tests.projects_vil.helpers import small_config

        root = request.getfixturevalue(root_fixture)
        monkeypatch.setenv("DETECTRON2_DATASETS", str(root))
        register_datasets(small_config(detector))
        return root / name

    return dataset


shapes = _registered("shapes", "datasets_root", "retinanet")
shapes_sem_seg = _registered("shapes_sem_seg", "sem_seg_root", "semantic_fpn")


@pytest.fixture(scope="session")
def trained_run(datasets_root, made_once):
    """Return the output directory of a run with four iterations, two numbered checkpoints, and an evaluation."""
    from tests.projects_vil.helpers import CONFIGS, EXACT_TRAINING, SMALL, run_tool

    def train(output: Path) -> None:
        words = ["--config-file", CONFIGS["retinanet"], *SMALL["retinanet"], *EXACT_TRAINING, "OUTPUT_DIR", output]
        result = run_tool("train_net.py", *words, datasets_root=datasets_root)
        assert result.returncode == 0, result.stderr
        (output / "stdout.txt").write_text(result.stdout)

    return made_once("trained_run", train)


@pytest.fixture(scope="session")
def file_of(made_once):
    """Return a function (detector, format, options of ``exporting.write``) -> path of the exported file."""
    from tests.projects_vil.export.exporting import write

    def find(name: str, file_format: str, **options) -> Path:
        def fill(folder: Path) -> None:
            (folder / "path").write_text(str(write(folder, name, file_format, **options)))

        label = "_".join([name, file_format, *(f"{key}_{value}" for key, value in sorted(options.items()))])
        return Path((made_once(label, fill) / "path").read_text())

    return find
