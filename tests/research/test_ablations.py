"""The models of the papers' ablations: their published counts, gradients, and an equal model of timm."""

import pytest
import timm
import torch
from torch import nn

from backbones import ConfigError
from backbones.cvt import ConvLongShortAttention
from research import timm_models  # noqa: F401  registers the models
from research.ablations import CHANGES, ROWS, ConvAttention, count_row, create_changed_classifier
from research.attention_figure import mean_attention, plot_attention
from tests.backbones.helpers import random_images, randomize
from tests.selection import slow_except


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_counts_of_the_papers(row):
    """ViL Table 2, LS Table 3, LIT Tables 4 and 5. LIT truncates parameters; PVT-S has the 24.5 of its own paper."""
    name, source, parameters, flops, variant, options = row
    millions, _, with_norms = count_row(variant, options)
    if options.get("changes") == "pvt":
        assert (parameters, f"{millions:.1f}") == ("25", "24.5")
    elif source.startswith("LIT"):
        assert int(millions) == int(parameters)
    else:
        assert f"{millions:.{len(parameters.partition('.')[2])}f}" == parameters
    # Printed 31.9
    assert f"{with_norms:.1f}" == ("31.1" if name == "CvT-13, 384" else flops)


def test_both_changes_of_the_embedding_give_deit():
    """ViL Table 11: the rows are DeiT, with a LayerNorm, and with 2-D positions."""
    with torch.device("meta"):
        deit = timm.create_model("deit_tiny_patch16_224")
        ours = create_changed_classifier("evit_full_16_tiny", changes=("positions_1d", "no_embed_norm"))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in deit.parameters())


MODELS = {name: "lit_ti" for name in CHANGES if name.startswith("pvt")}
MODELS |= {"positions_1d": "vil_tiny", "no_embed_norm": "vil_tiny"}


@pytest.mark.parametrize("change", slow_except(CHANGES, ["full_attention", "pvt", "positions_1d", "no_dual_norm"]))
def test_every_parameter_of_a_changed_model_gets_a_gradient(change):
    torch.manual_seed(0)
    name = MODELS.get(change, "cvt_ls_13")
    model = timm.create_model(name, changes=change, img_size=(64, 96), num_classes=5).train()
    logits = randomize(model)(random_images(2, 3, 64, 96).float())
    (logits * torch.arange(10).view(2, 5)).sum().backward()
    assert not [key for key, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


def test_a_class_token_is_a_token_of_full_attention():
    """Without the convolution, a class token and N tokens are N + 1 tokens."""
    torch.manual_seed(0)
    like = randomize(ConvLongShortAttention(6, num_heads=2, rank=1, chunk_size=2)).double()
    like.conv_qkv.norm = nn.Identity()
    tokens = torch.randn(2, 8, 6, dtype=torch.float64)
    with torch.no_grad():
        like.conv_qkv.depthwise.weight.copy_(torch.eye(9)[4].view(3, 3))
        expected = ConvAttention(like, num_global_tokens=0)(tokens, (2, 4))
        torch.testing.assert_close(ConvAttention(like, num_global_tokens=1)(tokens, (1, 7)), expected)


def test_a_change_without_effect_raises():
    for name, change in (("vil_tiny", "pvt"), ("lit_ti", "full_attention"), ("cvt_ls_13", "positions_1d")):
        with pytest.raises(ConfigError, match=f"'{change}' has no effect on {name}"):
            create_changed_classifier(name, changes=change)


def test_the_mean_attention_of_all_heads():
    """LIT Figure 3: only the class token in the last stage gets a part of the attention."""
    torch.manual_seed(0)
    model = timm.create_model("lit_ti", changes="pvt_msa", token_merging="uniform", img_size=(64, 96)).eval()
    images = random_images(2, 3, 64, 96).float()
    mean = mean_attention(randomize(model), images)
    sizes = {1: (3, 1, 16, 24), 2: (4, 2, 8, 12), 3: (6, 5, 4, 6), 4: (3, 8, 2, 3)}
    assert {stage: tuple(maps.shape) for stage, maps in mean.items()} == sizes
    assert [torch.allclose(maps.sum(dim=(2, 3)), torch.tensor(1.0)) for maps in mean.values()] == [True] * 3 + [False]
    one, other = (mean_attention(model, [image]) for image in images)
    assert all(torch.allclose(maps, (one[stage] + other[stage]) / 2) for stage, maps in mean.items())
    assert len(plot_attention(mean).subfigs) == 4
    with pytest.raises(ConfigError, match="no attention to draw"):
        mean_attention(model, [])
