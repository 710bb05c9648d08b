"""Choices that the command line and the library share. This module has no imports, so ``--help`` is fast."""

DETECTORS = ("retinanet", "mask_rcnn", "faster_rcnn")
DEVICES = ("cpu", "cuda")
SCHEDULES = ("1x", "3x_ms")
RECIPES = ("finetune", "scratch", "paper")
# Arguments of other training programs, and the argument of `vil train` and of `train` with the same effect.
NAMES_OF_OTHERS = {"batch_size": "batch", "cfg": "config", "dataset": "data", "num_workers": "workers"}
NAMES_OF_OTHERS |= {"learning_rate": "lr", "lr0": "lr", "output_dir": "output", "project": "output"}
NAMES_OF_OTHERS |= dict.fromkeys(("img", "img_size", "imgsz", "resolution"), "image_size")
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
