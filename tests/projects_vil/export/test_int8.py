"""int8's images: prepared one by one, and those that the model does not take named before it is recorded."""

import shutil
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from projects_vil.data import load_dataset, register_datasets
from projects_vil.export import FORMATS
from projects_vil.export.formats.openvino import import_openvino
from projects_vil.export.images import comparison_images
from projects_vil.export.int8 import CalibrationImages
from projects_vil.export.stages import Stages
from tests.projects_vil.export.exporting import mistake, skip_without
from tests.projects_vil.helpers import small_config

TAKEN = {"sides": [32, 8192], "dtype": "uint8", "batched": False}


def test_images_from_all_over_the_training_set(shapes):
    cfg = small_config()
    files = [record["file_name"] for record in load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)]
    images = CalibrationImages(cfg, 4, TAKEN)
    assert len(images) == 4 and len(CalibrationImages(cfg, 100, TAKEN)) == len(files) == 16
    for image, expected in zip(images, comparison_images(cfg, files[::4]), strict=True):
        assert image.dtype == torch.uint8 and torch.equal(image, expected)
    (image,) = CalibrationImages(cfg, 1, TAKEN | {"dtype": "float32", "batched": True})
    assert image.dtype == torch.float32 and torch.equal(image[0].byte(), comparison_images(cfg, files[:1])[0])


def test_sides_of_each(shapes):
    cfg = small_config()
    images = CalibrationImages(cfg, 16, TAKEN)
    images.check()
    files = [record["file_name"] for record in load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)]
    sizes = [tuple(image.shape[1:]) for image in images]
    side = min(map(max, sizes))
    file, (height, width) = next(one for one in zip(files, sizes, strict=True) if max(one[1]) > side)
    text = mistake(CalibrationImages(cfg, 16, TAKEN | {"sides": [32, side]}).check)
    assert text == f"{file}: {height} x {width} pixels, and the model takes sides of 32 to {side}"


def test_a_file_is_read_when_it_is_asked_for(shapes, tmp_path, monkeypatch):
    shutil.copytree(shapes, tmp_path / "shapes")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    register_datasets(small_config())
    images = CalibrationImages(small_config(), 16, TAKEN)
    before = images[0]
    for path in (tmp_path / "shapes/train").iterdir():
        path.write_text("no image")
    assert before.shape[0] == 3 and mistake(images.check).startswith(f"cannot read the image {tmp_path}")


class Watched(Sequence[Tensor]):
    """Eight (4, 4) tensors; ``most`` is how many were there at once."""

    def __init__(self) -> None:
        self.made: list[weakref.ref] = []
        self.most = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        values = np.random.default_rng(range(len(self))[index]).normal(size=(4, 4)).astype(np.float32)
        self.made.append(weakref.ref(values))
        self.most = max(self.most, sum(one() is not None for one in self.made))
        return torch.from_numpy(values)


def onnx_product(folder):
    onnx = pytest.importorskip("onnx")
    from tests.projects_vil.export.onnx_graph.graphs import node, saved

    weight = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "weight")
    return saved(folder, node("MatMul", "x", "weight", "y", name="product"), constants=[weight])


def openvino_product(folder):
    skip_without("openvino")
    openvino = import_openvino()
    operators = openvino.opset13
    image = operators.parameter([4, 4], np.float32)
    product = operators.matmul(image, operators.constant(np.eye(4, dtype=np.float32)), False, False)
    openvino.save_model(openvino.Model([product], [image]), folder / "model.xml", compress_to_fp16=False)
    return folder / "model.xml"


@pytest.mark.parametrize(("file_format", "make"), [("onnx", onnx_product), ("openvino", openvino_product)])
def test_one_image_is_in_memory(tmp_path, file_format, make):
    images = Watched()
    source = make(tmp_path)
    path = source.with_stem("int8")
    FORMATS[file_format].quantize(source, path, images, Stages())
    # The one that a quantiser is done with may be there while the next is made.
    assert path.is_file() and len(images.made) >= len(images) and images.most <= 2
