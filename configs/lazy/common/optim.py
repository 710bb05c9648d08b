"""AdamW as configs/base/common.yaml has it: no decay of norms and biases, and of what a backbone's own list names."""

import torch
from detectron2.config import LazyCall as L

from projects_vil.solver import parameter_groups

optimizer = L(torch.optim.AdamW)(
    # The model is put there before the optimizer is made.
    params=L(parameter_groups)(base_lr="${..lr}", weight_decay="${..weight_decay}", lr_multipliers=[], layer_decay=1.0),
    lr=1e-4,
    weight_decay=0.05,
)
