"""A run's folder without a training: a small detector with its config, its evaluation and the report on an export."""

import json
from pathlib import Path

from projects_vil.checkpoint import Categories, Checkpointer, fingerprint
from projects_vil.evaluation import write_results
from tests.projects_vil.helpers import lively_detector, small_config

CLASSES = Categories((3, 7, 9), ("round | flat", "square", "triangle"))
EVALUATION = {"bbox": {"AP": 12.345, "AP50": 20.0, "APl": float("nan"), "AP-square": 1.0}}
PRIVATE = (
    *("DATASETS.COCO", '[["mine", "/home/me/secret/a.json", "/home/me/secret/photos"]]'),
    *("DATASETS.TRAIN", '("mine", "/home/me/secret/a.json for /home/me/secret/photos")'),
    *("DATASETS.TEST", '("mine",)', "LOGGING.WANDB", "secret_project", "LOGGING.MLFLOW", "secret_experiment"),
    *("MODEL.WEIGHTS", "/home/me/secret/pretrained.pth"),
)


def make_run(folder: Path, name: str = "retinanet") -> Path:
    cfg = small_config(name, *PRIVATE, "OUTPUT_DIR", str(folder), "INPUT.MIN_SIZE_TEST", "80")
    (folder / "config.yaml").write_text(cfg.dump())
    detector = lively_detector(cfg)
    Checkpointer(detector, str(folder), cfg=cfg).save("model_final")
    model = fingerprint(cfg, detector)
    write_results(cfg, dict(EVALUATION), model=model)
    row = {"height": 40, "width": 60, "detections": 3, "detections_exported": 3, "pairs": 3, "ok": True}
    row |= {"boxes": 1e-5, "scores": 1e-7, "unmatched": 0, "changed": 0, "borderline": 0}
    report = {"fingerprint": model, "file": "model.ts", "images": [row], "tolerances": {"boxes": 0.1, "scores": 0.1}}
    report |= {"bytes": 1234567, "opset": None, "precision": "fp32"}
    report["latency"] = {"eager_ms": 2.0, "exported_ms": 1.0, "ratio": 2.0, "height": 40, "width": 60, "threads": 1}
    (folder / "export").mkdir()
    (folder / "export/model.ts.report.json").write_text(json.dumps(report))
    return folder
