"""The ViL model: position tables and stochastic depth."""

import pytest
import torch

from backbones.backbone import BackboneSettings
from backbones.errors import ConfigError
from backbones.vil import ViL
from tests.backbones.attention.cases import attend
from tests.backbones.helpers import random_images, small_variant, small_vil


@pytest.mark.parametrize("side, lengths", [(160, (40, 20, 10, 5)), (161, (48, 24, 12, 6)), (1333, (336, 168, 84, 42))])
def test_tables_cover_whole_tokens_of_the_last_stage(side, lengths):
    with torch.device("meta"):
        model = ViL(small_variant(), BackboneSettings(max_img_size=(side, 32)))
    assert tuple(len(stage.positions.rows) for stage in model.stages) == lengths
    assert tuple(len(stage.positions.cols) for stage in model.stages) == (8, 4, 2, 1)
    with pytest.raises(ConfigError, match="max_img_size"):
        model(torch.empty(1, 3, 4 * lengths[0] + 1, 32, device="meta"))


def test_stochastic_depth_drops_paths_of_whole_images():
    """Each image has one of four outcomes, the same for local and global tokens. Kept paths are scaled."""
    rate, block = 0.25, small_vil("two_globals").stages[1].blocks[0]
    block.drop_path_rate = rate
    block.train()
    tokens, global_tokens = random_images(64, 5, 7, 8), random_images(64, 2, 8, seed=2)
    torch.manual_seed(0)
    global_output, output = block(torch.cat([global_tokens, tokens.flatten(1, 2)], dim=1), (5, 7)).split([2, 35], dim=1)
    update, global_update = attend(block.attention, block.attention_norm(tokens), block.attention_norm(global_tokens))

    def outcome(attention_kept: int, mlp_kept: int, x: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        x = x + attention_kept / (1 - rate) * change
        return x + mlp_kept / (1 - rate) * block.mlp(block.mlp_norm(x))

    count = {}
    for kept in ((0, 0), (0, 1), (1, 0), (1, 1)):
        local = (output.unflatten(1, (5, 7)) - outcome(*kept, tokens, update)).abs().amax(dim=(1, 2, 3)) < 1e-12
        globals_ = (global_output - outcome(*kept, global_tokens, global_update)).abs().amax(dim=(1, 2)) < 1e-12
        assert torch.equal(local, globals_)
        count[kept] = int(local.sum())
    assert sum(count.values()) == 64 and min(count.values()) > 0 and count[1, 1] > 24  # 36 on average
