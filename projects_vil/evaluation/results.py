"""The file of a run's results."""

import json
import logging
import math
from collections import OrderedDict
from pathlib import Path

from detectron2.config import CfgNode

RESULTS_FILE = "evaluation.json"


def write_results(cfg: CfgNode, results: OrderedDict) -> None:
    """Write ``OUTPUT_DIR/evaluation.json``; a metric that is not defined is null."""
    names = cfg.DATASETS.TEST
    by_dataset = {names[0]: results} if len(names) == 1 else results
    finite = {
        name: {
            task: {metric: value if math.isfinite(value) else None for metric, value in metrics.items()}
            for task, metrics in tasks.items()
        }
        for name, tasks in by_dataset.items()
    }
    path = Path(cfg.OUTPUT_DIR) / RESULTS_FILE
    path.write_text(json.dumps(finite, indent=2) + "\n")
    logging.getLogger(__name__).info("results written to %s", path)
