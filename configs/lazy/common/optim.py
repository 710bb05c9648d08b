"""AdamW as in configs/base/common.yaml: no weight decay for norms, biases and the backbone's ``no_weight_decay()``."""

import torch
from detectron2.config import LazyCall as L

from projects_vil.solver import parameter_groups

optimizer = L(torch.optim.AdamW)(
    # The trainer adds the model before it builds the optimizer.
    params=L(parameter_groups)(base_lr="${..lr}", weight_decay="${..weight_decay}", lr_multipliers=[], layer_decay=1.0),
    lr=1e-4,
    weight_decay=0.05,
)
