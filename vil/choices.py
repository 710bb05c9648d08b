"""Choices that the command line and the library share. This module imports no libraries, so ``--help`` is fast."""

from pathlib import Path

# The folder of the package in a wheel, or of the repository in an editable installation.
_PACKAGE, _REPOSITORY = Path(__file__).parents[1] / "projects_vil", Path(__file__).parents[1]
CONFIGS, EXAMPLES = (
    _PACKAGE / name if (_PACKAGE / name).is_dir() else _REPOSITORY / name for name in ("configs", "examples")
)
ZOO = _PACKAGE / "checkpoint/zoo.yaml"
DETECTORS = ("retinanet", "mask_rcnn", "faster_rcnn")
DEVICES = ("cpu", "cuda")
SCHEDULES = ("1x", "3x_ms")
RECIPES = ("finetune", "scratch", "paper")
# Smallest and largest image size of `vil train`, in pixels.
IMAGE_SIZES = (64, 4096)
# Commands, arguments and values of other programs, and the ones or the config keys with the same effect.
NAMES_OF_OTHERS = {"batch_size": "batch", "cfg": "config", "dataset": "data", "num_workers": "workers"}
NAMES_OF_OTHERS |= {"learning_rate": "lr", "lr0": "lr"} | dict.fromkeys(("output_dir", "project", "name"), "output")
NAMES_OF_OTHERS |= {"iou": "MODEL.RETINANET.NMS_THRESH_TEST", "weight_decay": "SOLVER.WEIGHT_DECAY"}
NAMES_OF_OTHERS |= {"pascal": "voc", "pascal_voc": "voc", "pt": "torchscript", "tensorrt": "onnx", "engine": "onnx"}
NAMES_OF_OTHERS |= {"detect": "predict", "test": "eval"}
NAMES_OF_OTHERS |= dict.fromkeys(("img", "img_size", "imgsz", "resolution"), "image_size")
NAMES_OF_OTHERS |= {"conf": "score_threshold", "source": "input", "amp": "SOLVER.AMP.ENABLED", "seed": "SEED"}
NAMES_OF_OTHERS |= {"optimizer": "SOLVER.OPTIMIZER", "patience": "SOLVER.EARLY_STOPPING_PATIENCE"}
EXPORT_FORMATS = ("torchscript", "onnx", "aot_inductor", "torch_export", "openvino")
# Suffixes of exported files: TorchScript, ONNX, torch.export and AOTInductor, OpenVINO.
EXPORT_SUFFIXES = (".ts", ".onnx", ".pt2", ".xml")
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
INPUT_DTYPES = ("uint8", "float32")
PREDICTION_FORMATS = ("coco", "parquet")
LABEL_FORMATS = ("coco", "yolo", "voc", "labelme", "cvat")
# Images in a Parquet file.
PART_SIZE = 1024
# Lowest score of a detection in a drawing.
SCORE_THRESHOLD = 0.3
BENCHMARK_PARTS = ("attention", "backbone", "detector", "train-step")
DTYPES = ("float32", "bfloat16", "float16")
