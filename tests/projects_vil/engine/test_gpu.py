"""Training on a GPU: every family in both detectors and every type, synchronised norms, two devices, exports."""

import math

import pytest
import torch

from projects_vil import Trainer, load_config
from projects_vil.checkpoint import build_detector
from projects_vil.export import export_detector
from tests.gpu import DEVICE, on_gpu, on_gpus
from tests.projects_vil.helpers import CONFIGS, SMALL, run_tool

FAMILIES = ("vil", "ls", "lit", "cvt")
PRECISIONS = {
    "float32": [],
    "bfloat16": ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "bfloat16"],
    "float16": ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "float16"],
}


def options(output, *others: str) -> list[str]:
    found = ["SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "4", "SOLVER.WARMUP_ITERS", "0", "SOLVER.BASE_LR", "1e-3"]
    return [*found, "OUTPUT_DIR", str(output), "DATASETS.TEST", "()", "MODEL.DEVICE", DEVICE, *others]


@on_gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_family_trains(shapes, tmp_path, detector, family, precision):
    if DEVICE == "cpu" and precision == "float16":
        pytest.skip("float16 is for GPUs")
    path = CONFIGS[detector].with_name(f"{detector}_{family}_shapes.yaml")
    cfg = load_config(path, [*SMALL[detector], *options(tmp_path, *PRECISIONS[precision])])
    trainer = Trainer(cfg)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    losses = trainer.storage.history("total_loss").values()
    assert len(losses) >= 3 and all(math.isfinite(value) for value, _ in losses)
    moved = 0
    for name, parameter in trainer.model.named_parameters():
        assert parameter.device.type == DEVICE and parameter.isfinite().all(), name
        moved += not torch.equal(parameter, before[name])
    assert moved > 0.9 * len(before)


@on_gpu
@pytest.mark.parametrize(
    "options_of_a_step",
    [
        *(["MODEL.TRANSFORMER.ATTENTION_BACKEND", "triton", *PRECISIONS[name]] for name in ("bfloat16", "float16")),
        ["MODEL.TRANSFORMER.ACTIVATION_CHECKPOINTING", "True", "MODEL.TRANSFORMER.ATTENTION_BACKEND", "sdpa"],
        ["MODEL.EMA.ENABLED", "True", "SOLVER.ACCUMULATE", "2", "MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL", "0.5"],
    ],
)
def test_options_of_a_step(shapes, tmp_path, options_of_a_step):
    if DEVICE == "cpu" and "triton" in options_of_a_step:
        pytest.skip("Triton's kernels are for GPUs")
    overrides = [*SMALL["mask_rcnn"], *options(tmp_path, *options_of_a_step)]
    trainer = Trainer(load_config(CONFIGS["mask_rcnn"], overrides))
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@on_gpu
def test_a_detector_finds_on_a_gpu_what_it_finds_on_a_cpu(trained_run):
    """Scores within 1e-3, from the same checkpoint."""
    image = {"image": torch.full((3, 96, 128), 99.0), "height": 96, "width": 128}
    image["image"][:, 20:60, 30:80] = 180.0
    found = []
    for device in ("cpu", DEVICE):
        cfg = load_config(trained_run / "config.yaml", ["MODEL.DEVICE", device])
        model = build_detector(cfg, trained_run / "model_final.pth").eval()
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
def test_two_processes_with_synchronised_norms(datasets_root, tmp_path):
    """LIT's, over NCCL."""
    config = CONFIGS["retinanet"].with_name("retinanet_lit_shapes.yaml")
    command = ["--config-file", config, *SMALL["retinanet"], *options(tmp_path, "MODEL.TRANSFORMER.BATCH_NORM", "sync")]
    result = run_tool("train_net.py", "--num-gpus", 2, *command, datasets_root=datasets_root, fresh=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "model_final.pth").is_file()
