"""Training on a GPU: every family in both detectors and dtypes, synchronized norms, two devices, exports."""

import itertools

import pytest
import torch

from projects_vil import load_config
from projects_vil.checkpoint import load_detector
from projects_vil.export import export_detector
from tests.gpu import DEVICE, on_gpu, on_gpus
from tests.projects_vil.engine.test_trainer import train_family
from tests.projects_vil.helpers import CONFIGS, ROOT, SMALL, run_python

FAMILIES = ("vil", "ls", "lit", "cvt")
PRECISIONS = {
    "float32": [],
    "bfloat16": ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "bfloat16"],
    "float16": ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "float16"],
}


SHIFT = ["MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION", "0.5"]
OPTIONS = (
    *(["MODEL.TRANSFORMER.ATTENTION_BACKEND", "triton", *PRECISIONS[name]] for name in ("bfloat16", "float16")),
    ["MODEL.TRANSFORMER.ACTIVATION_CHECKPOINTING", "True", "MODEL.TRANSFORMER.ATTENTION_BACKEND", "sdpa"],
    ["MODEL.EMA.ENABLED", "True", "SOLVER.GRADIENT_ACCUMULATION_STEPS", "2", *SHIFT],
)


@pytest.fixture(autouse=True)
def without_tf32():
    """Disable TF32, to which PyTorch's convolutions round by default, with errors of 1e-3."""
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@on_gpu
@pytest.mark.parametrize(
    "detector, family, options",
    [
        *itertools.product(["retinanet"], FAMILIES, [PRECISIONS["bfloat16"]]),
        *itertools.product(["mask_rcnn"], FAMILIES, PRECISIONS.values()),
        *(("mask_rcnn", "vil", options) for options in OPTIONS),
    ],
)
def test_every_family_and_option_trains(shapes, tmp_path, detector, family, options):
    if DEVICE == "cpu" and {"float16", "triton"} & set(options):
        pytest.skip("float16 and Triton's kernels are for GPUs")
    trainer, unchanged = train_family(detector, family, tmp_path, "MODEL.DEVICE", DEVICE, *options)
    parameters = list(trainer.model.parameters())
    assert {parameter.device.type for parameter in parameters} == {DEVICE}
    assert len(unchanged) < 0.1 * len(parameters)


@on_gpu
def test_gpu_and_cpu_detections_are_equal(trained_run):
    """Scores differ by at most 1e-3."""
    image = {"image": torch.full((3, 96, 128), 99.0), "height": 96, "width": 128}
    image["image"][:, 20:60, 30:80] = 180.0
    found = []
    for device in ("cpu", DEVICE):
        cfg = load_config(trained_run / "config.yaml", ["MODEL.DEVICE", device])
        model = load_detector(cfg, trained_run / "model_final.pth")[0].eval()
        with torch.no_grad():
            found.append(model([image])[0]["instances"].to("cpu"))
    number = min(len(found[0]), len(found[1]), 5)
    assert number and abs(len(found[0]) - len(found[1])) <= 5
    torch.testing.assert_close(found[1].scores[:number], found[0].scores[:number], atol=1e-3, rtol=0)


@on_gpu
def test_export_parity_on_gpu(trained_run, tmp_path):
    cfg = load_config(trained_run / "config.yaml", ["MODEL.DEVICE", DEVICE])
    path, report = export_detector(cfg, trained_run / "model_final.pth", tmp_path)
    assert path.is_file() and report["ok"]


@on_gpus(2)
def test_two_processes_with_synchronized_norms(datasets_root, tmp_path):
    """BatchNorm of LIT, over NCCL."""
    config = CONFIGS["retinanet"].with_name("retinanet_lit_shapes.yaml")
    command = ["--config-file", config, *SMALL["retinanet"], "OUTPUT_DIR", tmp_path, "MODEL.DEVICE", DEVICE]
    command += ["SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "4", "MODEL.TRANSFORMER.NORM", "SyncBN"]
    result = run_python(ROOT / "tools/train_net.py", "--num-gpus", 2, *command, datasets_root=datasets_root)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "model_final.pth").is_file()
