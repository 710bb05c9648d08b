"""Count GPU work of forward and backward passes of backbones, and print JSON: {name: [launches, bytes, waits by line]}.

Argument: keywords of ``create_backbone`` by a name for them, as JSON; Swin-T of detectron2 is ``swin_t``. Two images of
800 x 1344, bfloat16 by autocast.
"""

import json
import sys

import mockcuda
import torch
from detectron2.modeling.backbone.swin import SwinTransformer

from backbones import create_backbone


def count(model: torch.nn.Module) -> tuple[int, int, dict[str, int]]:
    model.cuda().train()
    images = torch.rand(2, 3, 800, 1344).cuda()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            maps = model(images)
        sum(x.float().square().mean() for x in maps.values()).backward()

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with mockcuda.Count() as counted:
        step()
    return counted.launches, torch.cuda.max_memory_allocated() - before, counted.waits


counts = {"swin_t": count(SwinTransformer(drop_path_rate=0.1))}
for name, options in json.loads(sys.argv[1]).items():
    counts[name] = count(create_backbone(**{"attention_backend": "sdpa", "drop_path_rate": 0.1} | options))
with mockcuda.Count() as counted:
    torch.ones(1).cuda().add(1).item()
counts["a sum"] = counted.launches, 0, counted.waits
print(json.dumps(counts))
