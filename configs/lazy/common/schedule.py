"""The schedule of configs/base/schedule_1x.yaml, scaled to train.max_iter."""

from detectron2.config import LazyCall as L
from detectron2.solver import WarmupParamScheduler
from fvcore.common.param_scheduler import MultiStepParamScheduler

lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(MultiStepParamScheduler)(values=[1.0, 0.1, 0.01], milestones=[60000, 80000], num_updates=90000),
    warmup_factor=0.01,
    warmup_length=1000 / 90000,
    warmup_method="linear",
)
