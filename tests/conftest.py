"""What the tests of detectron2's side share: a small dataset, and one short training run over it."""

import shutil

import pytest


@pytest.fixture(scope="session")
def datasets_root(tmp_path_factory):
    """A folder for ``DETECTRON2_DATASETS`` that holds ``shapes``: 16 + 8 images, all with objects."""
    from projects_vil.data import write_shapes_dataset

    root = tmp_path_factory.mktemp("datasets")
    write_shapes_dataset(root / "shapes", num_train=16, num_val=8, short_side=64)
    return root


@pytest.fixture
def shapes(datasets_root, monkeypatch):
    """The shapes dataset, with ``DETECTRON2_DATASETS`` set to the folder above and the names registered."""
    from projects_vil.data import register_datasets
    from tests.projects_vil.helpers import small_config

    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_root))
    register_datasets(small_config())
    return datasets_root / "shapes"


@pytest.fixture(scope="session")
def sem_seg_root(tmp_path_factory):
    """A folder for ``DETECTRON2_DATASETS`` that holds ``shapes_sem_seg``: 8 + 6 images with label images."""
    from projects_vil.data import write_shapes_dataset

    root = tmp_path_factory.mktemp("sem_seg")
    write_shapes_dataset(root / "shapes_sem_seg", task="sem_seg", num_train=8, num_val=6, short_side=64)
    return root


@pytest.fixture
def shapes_sem_seg(sem_seg_root, monkeypatch):
    """The label images, with ``DETECTRON2_DATASETS`` set to the folder above and the names registered."""
    from projects_vil.data import register_datasets
    from tests.projects_vil.helpers import small_config

    monkeypatch.setenv("DETECTRON2_DATASETS", str(sem_seg_root))
    register_datasets(small_config("semantic_fpn"))
    return sem_seg_root / "shapes_sem_seg"


@pytest.fixture(scope="session")
def trained_run(datasets_root, tmp_path_factory):
    """OUTPUT_DIR of ``tools/train_net.py``: four iterations, a checkpoint after two, an evaluation."""
    from tests.projects_vil.helpers import CONFIGS, EXACT_TRAINING, SMALL, run_tool

    output = tmp_path_factory.mktemp("trained") / "run"
    overrides = [*SMALL["retinanet"], *EXACT_TRAINING, "OUTPUT_DIR", str(output)]
    result = run_tool(
        "train_net.py", "--config-file", CONFIGS["retinanet"], *overrides, datasets_root=datasets_root
    )
    assert result.returncode == 0, result.stderr
    (output / "stdout.txt").write_text(result.stdout)
    yield output
    shutil.rmtree(output)
