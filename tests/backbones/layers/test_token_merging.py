"""Token merging: deformable convolution by hand, its types under autocast, its norms, the uniform types, Figure 2."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import PatchMerging, SwinTransformer
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from backbones import ConfigError
from backbones.layers import token_merging
from backbones.layers.batch_norm import BATCH_NORMS
from backbones.layers.token_merging import (
    DeformableTokenMerging,
    LinearTokenMerging,
    sampled_positions,
    with_deformable_merging,
)
from tests.backbones.helpers import assert_all_close, outputs_and_gradients, random_images, randomise, trace
from tests.backbones.official_lit import deformable_by_grid_sample

SIZES = [(6, 8), (5, 8), (6, 7), (3, 5), (1, 1), (2, 9)]
sizes = pytest.mark.parametrize("height, width", SIZES)


def small_merging(in_channels: int = 3, dim: int = 4, **options) -> DeformableTokenMerging:
    """In eval mode, with random float64 weights and statistics."""
    module = randomise(DeformableTokenMerging(in_channels, dim, **options)).double().eval()
    with torch.no_grad():
        module.offset.weight.mul_(2)
        module.norm.weight.copy_(1 + 0.3 * random_images(dim, seed=3))
        module.norm.bias.copy_(random_images(dim, seed=4))
        module.norm.running_mean.copy_(random_images(dim, seed=5))
        module.norm.running_var.copy_(0.5 + random_images(dim, seed=6).abs())
    return module


def deformable_by_loops(features: Tensor, offset: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Equation 7, position by position: four neighbours of each sampling position, those beyond the map left out."""
    batch, _, height, width = features.shape
    images = []
    for image in range(batch):
        positions = []
        for row in range(height // 2):
            for col in range(width // 2):
                total = bias
                for tap in range(4):
                    y = 2 * row + tap // 2 + offset[image, 2 * tap, row, col]
                    x = 2 * col + tap % 2 + offset[image, 2 * tap + 1, row, col]
                    top, left = math.floor(y.item()), math.floor(x.item())
                    for near_y in (top, top + 1):
                        for near_x in (left, left + 1):
                            if 0 <= near_y < height and 0 <= near_x < width:
                                share = (1 - (y - near_y).abs()) * (1 - (x - near_x).abs())
                                value = features[image, :, near_y, near_x]
                                total = total + share * (weight[:, :, tap // 2, tap % 2] @ value)
                positions.append(total)
        images.append(torch.stack(positions, dim=1))
    return torch.stack(images).unflatten(2, (height // 2, width // 2))


def finish(module: DeformableTokenMerging, merged: Tensor) -> Tensor:
    """Equation 8 in eval mode, and channels last."""
    norm = module.norm
    scale = (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None]
    merged = (merged - norm.running_mean[:, None, None]) * scale + norm.bias[:, None, None]
    return (0.5 * merged * (1 + torch.erf(merged / math.sqrt(2)))).permute(0, 2, 3, 1)


def padded(features: Tensor) -> Tensor:
    return F.pad(features, (0, features.shape[3] % 2, 0, features.shape[2] % 2))


@sizes
@pytest.mark.parametrize("by_hand", [deformable_by_loops, deformable_by_grid_sample])
def test_equals_sampling_by_hand_with_its_gradients(height, width, by_hand):
    module, features = small_merging(), random_images(2, 3, height, width).requires_grad_()
    leaves = {"features": features} | {n: p for n, p in module.named_parameters()}

    def results(output: Tensor) -> dict[str, Tensor]:
        weights = torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view(output.shape)
        gradients = torch.autograd.grad((output * weights).sum(), list(leaves.values()))
        return {"output": output.detach()} | dict(zip(leaves, gradients, strict=True))

    offset = F.conv2d(padded(features), module.offset.weight, module.offset.bias, stride=2)
    assert offset.abs().max() > (1 if height > 1 else 0.5)
    expected = results(finish(module, by_hand(padded(features), offset, module.weight, module.bias)))
    actual = results(module(features))
    assert actual["output"].shape == (2, -(-height // 2), -(-width // 2), 4)
    assert_all_close(actual, expected, tolerance=1e-10)
    assert all(tensor.ne(0).any() for tensor in actual.values())


@sizes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_both_operators_are_the_same(height, width, dtype):
    """Sampling, which the CPU takes, and torchvision's operator, which a GPU takes; positions up to beyond the map."""
    inputs = {
        "features": random_images(2, 3, 2 * height, 2 * width, dtype=dtype),
        "offset": 3 * random_images(2, 8, height, width, seed=2, dtype=dtype),
        "weight": random_images(4, 3, 2, 2, seed=3, dtype=dtype),
        "bias": random_images(4, seed=4, dtype=dtype),
    }
    by_sampling, expected = (
        outputs_and_gradients(lambda operator=operator, **x: operator(*x.values(), stride=2), inputs)
        for operator in (token_merging._deformable(torch.device(device)) for device in ("cpu", "cuda"))
    )
    assert_all_close(by_sampling, expected, tolerance=1e-10 if dtype == torch.float64 else 1e-3)


@sizes
def test_without_offsets_it_is_a_convolution(height, width):
    module, features = small_merging(), random_images(2, 3, height, width)
    nn.init.zeros_(module.offset.weight)
    nn.init.zeros_(module.offset.bias)
    convolved = F.conv2d(padded(features), module.weight, module.bias, stride=2)
    torch.testing.assert_close(module(features), finish(module, convolved), atol=1e-12, rtol=1e-12)


def test_initial_values():
    """Offsets at zero (section 4.1); the rest as PyTorch's convolutions."""
    torch.manual_seed(0)
    module = DeformableTokenMerging(64, 128)
    assert module.offset.weight.eq(0).all() and module.offset.bias.eq(0).all()
    convolution = nn.Conv2d(64, 128, 2)
    for values, others in ((module.weight, convolution.weight), (module.bias, convolution.bias)):
        assert values.std().item() == pytest.approx(others.std().item(), rel=0.2)
        assert values.abs().max() <= 1 / 16
    assert {name for name, _ in module.named_parameters()} == {
        "offset.weight",
        "offset.bias",
        "weight",
        "bias",
        "norm.weight",
        "norm.bias",
    }


def test_offsets_are_y_before_x():
    module = small_merging(1, 1)
    features = torch.arange(24.0, dtype=torch.float64).view(1, 1, 4, 6)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.weight[0, 0, 0, 1] = 1  # the upper right of the four
        module.norm.weight.fill_(1)
        module.norm.running_mean.zero_()
        module.norm.running_var.fill_(1 - module.norm.eps)
        module.offset.bias[2:4] = torch.tensor([1.0, 0.5])  # down, and half a token to the right
    assert module.offsets(features)[0, 0, 1, 0, 1].tolist() == [1.0, 0.5]
    # From (0, 3) to (1, 3.5): between the values 9 and 10
    torch.testing.assert_close(module(features)[0, 0, 1, 0], F.gelu(torch.tensor(9.5, dtype=torch.float64)))


@sizes
def test_offsets_are_those_of_the_convolution(height, width):
    module, features = small_merging(), random_images(2, 3, height, width)
    offset = F.conv2d(padded(features), module.offset.weight, module.offset.bias, stride=2)
    offsets = module.offsets(features)
    assert offsets.shape == (2, -(-height // 2), -(-width // 2), 2, 2, 2)
    for row in range(2):
        for col in range(2):
            for axis in range(2):
                channel = 2 * (2 * row + col) + axis
                torch.testing.assert_close(offsets[..., row, col, axis], offset[:, channel])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sampling_is_float32_under_autocast(dtype, monkeypatch):
    module, features = small_merging().float(), random_images(2, 3, 5, 8, dtype=torch.float32)
    expected, seen = module(features), []

    def record(*tensors, stride):
        seen.append([x.dtype for x in tensors])
        return torch.zeros(2, 4, 3, 4)

    monkeypatch.setattr(token_merging, "deformable_by_sampling", record)
    with torch.autocast("cpu", dtype):
        module(features)
        module(features.to(dtype))
    assert seen == [[torch.float32] * 4] * 2
    monkeypatch.undo()
    with torch.autocast("cpu", dtype):
        output, offsets = module(features), module.offsets(features)
    assert output.dtype == offsets.dtype == torch.float32
    torch.testing.assert_close(output, expected, atol=0, rtol=0)
    torch.testing.assert_close(offsets, module.offsets(features), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", BATCH_NORMS)
def test_the_result_has_the_type_of_the_map(dtype, norm):
    module, features = small_merging(norm=norm), random_images(2, 3, 5, 8)
    output = module.to(dtype)(features.to(dtype))
    assert output.dtype == dtype
    tolerance = 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), small_merging(norm=norm)(features), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains(dtype):
    module, features = small_merging().float().train(), random_images(2, 3, 5, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        output = module(features.to(dtype))
    output.float().square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name
        assert parameter.grad.ne(0).any() or name == "bias", name  # the norm takes the bias away


@pytest.mark.parametrize(
    "norm, norm_type", [("batch", nn.BatchNorm2d), ("frozen", FrozenBatchNorm2d), ("sync", nn.SyncBatchNorm)]
)
def test_norms(norm, norm_type):
    module, features = small_merging(norm=norm), random_images(4, 3, 5, 8)
    assert type(module.norm) is norm_type
    torch.testing.assert_close(module(features), small_merging()(features), atol=1e-12, rtol=1e-12)
    before = {name: tensor.clone() for name, tensor in module.norm.state_dict().items()}
    module.train()(features)
    moved = any(not torch.equal(tensor, before[name]) for name, tensor in module.norm.state_dict().items())
    assert moved == (norm != "frozen")
    assert any(name.startswith("norm.") for name, _ in module.named_parameters()) == (norm != "frozen")


def test_an_unknown_norm_raises():
    with pytest.raises(ConfigError, match="unknown batch norm 'bath'.*did you mean 'batch'"):
        DeformableTokenMerging(3, 4, norm="bath")


@pytest.mark.parametrize("module", [small_merging(), small_merging(norm="frozen"), LinearTokenMerging(3, 4).double()])
def test_a_trace_is_right_for_other_sizes(module):
    traced = trace(module, (random_images(1, 3, 8, 6),))
    for batch, (height, width) in enumerate(SIZES, start=1):
        features = random_images(batch, 3, height, width)
        torch.testing.assert_close(traced(features), module(features), atol=1e-12, rtol=1e-12)


@sizes
def test_linear_merging_is_that_of_swin(height, width):
    swin, ours = PatchMerging(3, 8).double(), LinearTokenMerging(3, 8).double()
    randomise(swin)
    ours.load_state_dict(swin.state_dict())
    features = random_images(2, 3, height, width)
    torch.testing.assert_close(ours(features), swin(features.permute(0, 2, 3, 1)), atol=1e-12, rtol=1e-12)


def test_without_offsets_a_token_comes_from_the_regular_grid():
    """The green rectangle of Figure 2: 8 x 8 positions, each once."""
    offsets = [torch.zeros(height, 2 * height, 2, 2, 2) for height in (8, 4, 2)]
    positions = sampled_positions(offsets, 1, 2)
    expected = {(float(row), float(col)) for row in range(8, 16) for col in range(16, 24)}
    assert len(positions) == 64 and {tuple(position) for position in positions.tolist()} == expected


def test_sampled_positions_by_hand():
    first, second = torch.zeros(4, 3, 2, 2, 2), torch.zeros(2, 2, 2, 2, 2)
    second[0, 1, 1, 0] = torch.tensor([1.4, -0.6])  # from (1, 2) to (2.4, 1.4), next to (2, 1)
    second[0, 1, 0, 1] = torch.tensor([-9.0, 9.0])  # beyond the map: its corner (0, 2)
    first[2, 1, 1, 1] = torch.tensor([0.25, 0.5])
    positions = sampled_positions([first, second], 0, 1).view(2, 2, 2, 2, 2)
    assert positions[1, 0].tolist() == [[[4.0, 2.0], [4.0, 3.0]], [[5.0, 2.0], [5.25, 3.5]]]
    assert positions[0, 1].tolist() == [[[0.0, 4.0], [0.0, 5.0]], [[1.0, 4.0], [1.0, 5.0]]]
    for row, col in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(ConfigError, match=f"no token .{row}, {col}. in a map of 2 x 2"):
            sampled_positions([first, second], row, col)


def test_sampled_positions_are_where_the_gradient_goes():
    module, features = small_merging(1, 2), random_images(1, 1, 12, 10).requires_grad_()
    nn.init.zeros_(module.offset.weight)  # offsets from the bias, so that the map has no gradient through them
    (position_gradient,) = torch.autograd.grad(module(features)[0, 2, 3].sum(), features)
    near = torch.zeros(12, 10, dtype=torch.bool)
    for y, x in sampled_positions([module.offsets(features)[0]], 2, 3).tolist():
        near[math.floor(y) : math.floor(y) + 2, math.floor(x) : math.floor(x) + 2] = True
    assert torch.equal(position_gradient[0, 0].ne(0), near)


def small_swin() -> SwinTransformer:
    return SwinTransformer(
        img_size=64, embed_dim=8, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4), window_size=4, num_classes=5
    )


def test_swin_with_deformable_merging():
    """Table 4."""
    torch.manual_seed(0)
    swin = small_swin()
    before = {name: tensor.clone() for name, tensor in swin.state_dict().items()}
    model = randomise(with_deformable_merging(swin)).double().train()
    assert not any(isinstance(module, PatchMerging) for module in model.modules())
    assert sum(isinstance(module, DeformableTokenMerging) for module in model.modules()) == 3
    features = model.forward_features(random_images(2, 3, 64, 64))
    assert features.shape == (2, 2, 2, 64)
    logits = model(random_images(2, 3, 64, 64))
    assert logits.shape == (2, 5)
    (logits * torch.arange(10).view(2, 5)).sum().backward()
    lacking = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not [name for name in lacking if "table" not in name and not name.endswith("merging.bias")]
    assert swin.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in swin.state_dict().items())


def test_swin_keeps_all_but_its_merging():
    swin = small_swin().eval()
    ours = with_deformable_merging(swin, norm="frozen")
    assert not ours.training
    names = {name for name in swin.state_dict() if "downsample" not in name}
    assert {name for name in ours.state_dict() if "downsample" not in name} == names
    assert all(torch.equal(ours.state_dict()[name], swin.state_dict()[name]) for name in names)
    assert all(isinstance(m.norm, FrozenBatchNorm2d) for m in ours.modules() if isinstance(m, DeformableTokenMerging))


def test_swin_for_a_detector():
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", features_only=True, img_size=(64, 96), embed_dim=8, num_heads=(1, 2, 2, 4)
    )
    features = with_deformable_merging(swin).eval()(random_images(1, 3, 64, 96, dtype=torch.float32))
    assert [tuple(feature.shape) for feature in features] == [
        (1, 16, 24, 8),
        (1, 8, 12, 16),
        (1, 4, 6, 32),
        (1, 2, 3, 64),
    ]


def test_parameters_of_table_4():
    """28 million before and after; LayerNorm(4C) and Linear(4C, 2C) become a convolution, its offsets, BatchNorm."""
    with torch.device("meta"):
        swin = timm.create_model("swin_tiny_patch4_window7_224")
    ours = with_deformable_merging(swin)

    def count(model: nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    more = sum((8 * 4 * c + 8) + 2 * c + 2 * 2 * c - 2 * 4 * c for c in (96, 192, 384))
    assert count(ours) == count(swin) + more
    assert count(swin) // 10**6 == count(ours) // 10**6 == 28


def test_a_model_without_merging_raises():
    with pytest.raises(ConfigError, match="Linear has no PatchMerging"):
        with_deformable_merging(nn.Linear(1, 1))
