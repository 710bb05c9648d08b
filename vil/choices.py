"""Choices that the command line and the library share. This module imports no libraries, so ``--help`` is fast."""

from pathlib import Path

# The folder of the package in a wheel, or of the repository in an editable installation.
_PACKAGE = Path(__file__).parents[1] / "projects_vil"
_ROOT = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent
CONFIGS, EXAMPLES = _ROOT / "configs", _ROOT / "examples"
ZOO = _PACKAGE / "checkpoint/zoo.yaml"
DETECTORS = ("retinanet", "mask_rcnn", "faster_rcnn")
DEVICES = ("cpu", "cuda")
SCHEDULES = ("1x", "3x_ms")
RECIPES = ("finetune", "scratch", "paper")
# Smallest and largest image size of `vil train`, in pixels.
IMAGE_SIZES = (64, 4096)
# Config keys of arguments
KEYS = {"weights": "MODEL.WEIGHTS", "device": "MODEL.DEVICE", "image_size": "INPUT.MIN_SIZE_TEST"}
KEYS |= {"batch": "SOLVER.IMS_PER_BATCH", "epochs": "SOLVER.EPOCHS", "lr": "SOLVER.BASE_LR"}
KEYS |= {"output": "OUTPUT_DIR", "workers": "DATALOADER.NUM_WORKERS"}
# Our commands, arguments, values and config keys, each with the names that other programs use for it.
_OTHERS = {
    "batch": "batch_size",
    "config": "cfg",
    "data": "dataset dataset_dir data_dir data_path coco_path",
    "eval": "test validate validation",
    "format": "include",
    "image_size": "img img_size imgsz resolution",
    "input": "source",
    "lr": "learning_rate lr0",
    "num_gpus": "gpu gpus launcher",
    "onnx": "tensorrt engine",
    "output": "output_dir out_dir out work_dir save_dir project name",
    "precision": "half",
    "predict": "detect infer inference demo",
    "resume": "resume_from",
    "save_labels": "save_txt",
    "score_threshold": "conf conf_thres threshold score_thr",
    "torchscript": "pt",
    "voc": "pascal pascal_voc",
    "weights": "load_from checkpoint pretrained",
    "workers": "num_workers",
    "MODEL.RETINANET.NMS_THRESH_TEST": "iou iou_thres",
    "SEED": "seed",
    "SOLVER.AMP.ENABLED": "amp",
    "SOLVER.CHECKPOINT_PERIOD": "save_period",
    "SOLVER.EARLY_STOPPING_PATIENCE": "patience",
    "SOLVER.MAX_ITER": "max_iter",
    "SOLVER.OPTIMIZER": "optimizer",
    "SOLVER.WEIGHT_DECAY": "weight_decay",
}
NAMES_OF_OTHERS = {other: ours for ours, others in _OTHERS.items() for other in others.split()}
EXPORT_FORMATS = ("torchscript", "onnx", "aot_inductor", "torch_export", "openvino")
# Suffixes of exported files: TorchScript, ONNX, torch.export and AOTInductor, OpenVINO.
EXPORT_SUFFIXES = (".ts", ".onnx", ".pt2", ".xml")
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
INPUT_DTYPES = ("uint8", "float32")
PREDICTION_FORMATS = ("coco", "parquet")
LABEL_FORMATS = ("coco", "yolo", "voc", "labelme", "cvat")
# Images in a Parquet file.
PART_SIZE = 1024
# Lowest score of a detection in a drawing. It is low because RetinaNet's scores are low early in training.
SCORE_THRESHOLD = 0.3
BENCHMARK_PARTS = ("attention", "backbone", "detector", "train-step")
DTYPES = ("float32", "bfloat16", "float16")
# Whether the import of projects_vil registers its builders. This imports PyTorch and detectron2, which takes seconds.
# A command that only reads datasets sets it to False before the import.
registers_builders = True
