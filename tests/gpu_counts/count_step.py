"""Count GPU work in iterations of ``projects_vil.Trainer``, and print JSON: {"plain": ..., "written": ...}.

Each has "launches", and "waits" of the host by line. The "written" iteration writes metrics. Arguments:
retinanet or mask_rcnn, a dtype (float32, bfloat16 or float16), and overrides of the config.
"""

import contextlib
import json
import os
import sys
import tempfile

import mockcuda
from detectron2.engine import HookBase
from detectron2.engine.hooks import CallbackHook

from examples.make_shapes_dataset import write_shapes_dataset
from projects_vil import Trainer
from projects_vil.data import register_datasets
from tests.projects_vil.helpers import small_config

# Metrics are written every fourth iteration. The first iterations allocate permanent buffers.
PERIOD = 4
COUNTED = {6: "plain", 7: "written"}


class CountIterations(HookBase):
    """Count from the start of an iteration to the last hook."""

    def __init__(self) -> None:
        self.results: dict[str, dict] = {}
        self.stack = contextlib.ExitStack()

    def before_step(self) -> None:
        self.count = self.stack.enter_context(mockcuda.Count())

    def stop(self, trainer: Trainer) -> None:
        self.stack.close()
        if trainer.iter in COUNTED:
            self.results[COUNTED[trainer.iter]] = {"launches": self.count.launches, "waits": self.count.waits}


detector, dtype, *overrides = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
    write_shapes_dataset(f"{folder}/shapes", num_train=8, num_val=2)
    os.environ["DETECTRON2_DATASETS"] = folder
    os.mkdir(f"{folder}/run")
    options = ["MODEL.DEVICE", "cuda", "OUTPUT_DIR", f"{folder}/run", "SOLVER.MAX_ITER", "9", "TEST.EVAL_PERIOD", "0"]
    options += ["MODEL.EMA.ENABLED", "True", "MODEL.WEIGHTS", "", "MODEL.TRANSFORMER.ATTENTION_BACKEND", "sdpa"]
    if dtype != "float32":
        options += ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", dtype]
    cfg = small_config(detector, *options, *overrides)
    register_datasets(cfg)
    Trainer.log_period = PERIOD
    trainer, counting = Trainer(cfg), CountIterations()
    trainer._hooks.insert(0, counting)
    trainer.register_hooks([CallbackHook(after_step=counting.stop)])
    trainer.train()
print(json.dumps(counting.results))
