"""timm models as backbones, with random weights, weights from files, and weights from a cache of the Hub."""

import functools

import huggingface_hub.constants
import pytest
import timm
import torch
from detectron2.modeling import SimpleFeaturePyramid, ViT, build_model
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.vit import get_vit_lr_decay_rate
from safetensors.torch import save_file
from timm.models import swin_transformer, vision_transformer
from torch import nn

from backbones.checkpoint_files import read_checkpoint
from projects_vil import Detector, build_optimizer
from projects_vil.checkpoint import METADATA_KEY, Checkpointer, check_weights
from projects_vil.modeling import TimmBackbone, build_on_meta
from projects_vil.solver import layer_decay_factors
from tests.projects_vil.export.exporting import FEW_LEVELS
from tests.projects_vil.helpers import CONFIGS, SMALL, error_line, message, run_tool, small_config
from tests.projects_vil.inference.helpers import picture

SWIN, CONVNEXT, PVT, RESNET, VIT = "small_swin", "test_convnext", "pvt_v2_b0", "test_resnet.r160_in1k", "test_vit"
STAGES = ("stage1", "stage2", "stage3", "stage4")


@timm.models.register_model
def small_swin(pretrained: bool = False, **options) -> nn.Module:
    """The second block of the last stage shifts its windows."""
    sizes = {"embed_dim": 24, "depths": (1, 1, 1, 2), "num_heads": (1, 2, 4, 8)}
    return swin_transformer._create_swin_transformer("small_swin", pretrained, **sizes, **options)


def config(name: str, *overrides: str, detector: str = "mask_rcnn"):
    return small_config(detector, "MODEL.TRANSFORMER.VARIANT", f"timm:{name}", *overrides)


def backbone_of(name: str, *overrides: str, detector: str = "mask_rcnn") -> TimmBackbone:
    return build_model(config(name, *overrides, detector=detector)).backbone.bottom_up


@pytest.mark.parametrize("name", [SWIN, CONVNEXT, PVT, RESNET, VIT])
@pytest.mark.parametrize("detector, levels", [("retinanet", range(3, 8)), ("mask_rcnn", range(2, 7))])
def test_levels_and_gradients_for_images_of_any_size(name, detector, levels):
    model = build_model(config(name, detector=detector))
    for height, width in ((70, 101), (260, 33)):
        images = model.preprocess_image([{"image": torch.rand(3, height, width) * 255}] * 2)
        padded = images.tensor.shape[2:]
        maps = model.backbone(images.tensor)
        sizes = {f"p{level}": tuple(-(-side // 2**level) for side in padded) for level in levels}
        assert {key: x.shape[2:] for key, x in maps.items()} == sizes
    sum(x.square().mean() for x in maps.values()).backward()
    assert [name for name, p in model.backbone.named_parameters() if p.grad is None] == []


@torch.no_grad()
def test_same_padding_equals_timm_and_does_not_depend_on_the_size():
    """The padding of timm's ``Conv2dSame`` has expressions of the size, with which an export does not end."""
    theirs = timm.create_model("tf_efficientnet_lite0", features_only=True, out_indices=(1, 2, 3)).double().eval()
    for name, buffer in theirs.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    images = torch.randn(1, 3, 96, 160, dtype=torch.float64)
    for norm in ("BN", "FrozenBN"):
        ours = TimmBackbone("timm:tf_efficientnet_lite0", out_features=STAGES[:3], norm=norm).double().eval()
        assert not ours.net.model.load_state_dict(theirs.state_dict(), strict=False).missing_keys
        torch.testing.assert_close(list(ours(images).values()), theirs(images), rtol=1e-12, atol=1e-12)
    height, width = (32 * torch.export.Dim(name, min=2, max=40) for name in ("height", "width"))
    nodes = torch.export.export(ours, (images,), dynamic_shapes=({2: height, 3: width},)).graph.nodes
    # A quantization to int8 needs convolutions with constant weights.
    assert {node.args[1].op for node in nodes if "conv2d" in str(node.target)} == {"placeholder"}


def test_a_cpu_uses_channels_last():
    """Depthwise convolutions are faster in this format."""
    model, inputs = TimmBackbone("timm:tf_efficientnet_lite0", out_features=STAGES[1:2]), []
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for is_training in (True, False):
        assert model.train(is_training)(torch.randn(2, 3, 64, 96))[STAGES[1]].is_contiguous()
    assert [x.is_contiguous(memory_format=torch.channels_last) for x in inputs] == [True, True]


@timm.models.register_model
def vit_without_class_token(pretrained: bool = False, **options) -> nn.Module:
    """detectron2's ViT has no class token."""
    sizes = {"img_size": 64, "embed_dim": 24, "depth": 3, "num_heads": 3, "class_token": False, "global_pool": "avg"}
    return vision_transformer._create_vision_transformer("vit_without_class_token", pretrained, **sizes, **options)


def test_a_plain_vit_equals_vitdet():
    model = build_model(config("vit_without_class_token"))
    ours = model.backbone.double().eval()
    norm = functools.partial(nn.LayerNorm, eps=1e-6)
    vit = ViT(pretrain_img_size=64, embed_dim=24, depth=3, num_heads=3, pretrain_use_cls_token=False, norm_layer=norm)
    theirs = SimpleFeaturePyramid(vit, "last_feat", 32, (4.0, 2.0, 1.0, 0.5), top_block=LastLevelMaxPool())
    theirs = theirs.double().eval()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.2)
    for size in ((64, 64), (96, 160)):
        if size != (64, 64):
            # timm interpolates positions with antialiasing, detectron2 without it.
            ours.bottom_up.net.model.pos_embed.data[:] = 0.3
        theirs.load_state_dict({name.replace("bottom_up.net.model", "net"): x for name, x in ours.state_dict().items()})
        images = torch.randn(2, 3, *size).double()
        with torch.no_grad():
            found, expected = ours(images), theirs(images)
        assert list(found) == list(expected) == ["p2", "p3", "p4", "p5", "p6"]
        for name in found:
            torch.testing.assert_close(found[name], expected[name])
    factors = layer_decay_factors(model, 0.7)
    assert len(factors) == len(vit.state_dict())
    for name, factor in factors.items():
        assert factor == pytest.approx(get_vit_lr_decay_rate(name, 0.7, num_layers=3)), name


def test_swin_shifts_windows_in_the_last_stage():
    """In a classifier, the feature map of this stage is a single window, which timm does not shift."""
    backbone = TimmBackbone(f"timm:{SWIN}", out_features=STAGES)
    assert backbone.net.model.layers[3].blocks[1].shift_size == (3, 3)


@pytest.mark.parametrize(
    "name, overrides, named",
    [
        ("vit_small_patch14_dinov2", [], "strides 14, but a detector needs 4, 8, 16 and 32"),
        ("vit_small_patch8_224", [], "strides 8, but a detector needs 4, 8, 16 and 32"),
        ("vit_small_patch32_224", [], "a ViT of patch size 16"),
        (VIT, ["MODEL.BACKBONE.FREEZE_AT", "2"], "test_vit has 1 stage. Use 0 to 1."),
        (SWIN, ["MODEL.TRANSFORMER.NORM", "FrozenBN"], "has no batch norm. Leave out MODEL.TRANSFORMER.NORM"),
        ("maxvit_nano_rw_256", [], "fixed image size"),
        ("resnet19", [], "'timm:resnet18'"),
        ("resnet18.in30k", [], "in30k"),
        (SWIN, ["MODEL.TRANSFORMER.TOKEN_MERGING", "uniform"], "no option 'token_merging'"),
        (SWIN, ["MODEL.TRANSFORMER.ATTENTION_BACKEND", "triton"], "attention_backend"),
        ("densenet121", ["MODEL.TRANSFORMER.DROP_PATH", "0.1"], "MODEL.TRANSFORMER.DROP_PATH to 0.0"),
        (CONVNEXT, ["MODEL.FPN.IN_FEATURES", "['res2']"], "Unknown out_features 'res2'"),
    ],
)
def test_unsupported_models_and_options(name, overrides, named):
    assert named in message(build_on_meta, config(name, *overrides))


def test_frozen_stages_and_batch_norm():
    for detector in ("mask_rcnn", "retinanet"):
        backbone = backbone_of(RESNET, "MODEL.BACKBONE.FREEZE_AT", "2", detector=detector).train()
        frozen = {name.split(".")[2] for name, p in backbone.named_parameters() if not p.requires_grad}
        assert frozen == {"conv1", "bn1", "layer1", "layer2"}
        before = {name: x.clone() for name, x in backbone.named_buffers() if "running" in name}
        backbone(torch.rand(2, 3, 64, 96))
        changed = [name for name, x in backbone.named_buffers() if not torch.equal(x, before.get(name, x))]
        assert {name.split(".")[2] for name in changed} == {"layer3", "layer4"}
    default, other = backbone, backbone_of(RESNET, "MODEL.TRANSFORMER.NORM", "FrozenBN", detector="retinanet")
    weights = {name: x for name, x in default.state_dict().items() if "num_batches" not in name}
    other.load_state_dict(weights, strict=True)
    images = torch.rand(2, 3, 64, 96).double()
    torch.testing.assert_close(other.double().train()(images), default.double().eval()(images))


def test_weight_and_layer_decay_follow_timm():
    cfg = config(SWIN, "SOLVER.WEIGHT_DECAY", "0.05", "SOLVER.LAYER_DECAY", "0.5", "SOLVER.BASE_LR", "1.0")
    model = build_on_meta(cfg)
    names = {p: name.removeprefix("backbone.bottom_up.net.model.") for name, p in model.named_parameters()}
    groups = {names[p]: group for group in build_optimizer(cfg, model).param_groups for p in group["params"]}
    table, last = "layers.0.blocks.0.attn.relative_position_bias_table", "layers.3.blocks.1.mlp.fc2.weight"
    assert groups[table]["weight_decay"] == 0 and groups[last]["weight_decay"] == 0.05
    rates = [groups[name]["lr"] for name in ("patch_embed.proj.weight", table, last, "backbone.fpn_lateral2.weight")]
    assert rates == [0.5 ** (5 + 1), 0.5**5, 0.5, 1.0]


@pytest.mark.slow
def test_a_run_from_a_classifier_is_resumed_loaded_and_shared(datasets_root, tmp_path):
    """The variant has a tag, but with MODEL.WEIGHTS nothing is downloaded."""
    weights, output = tmp_path / "classifier.safetensors", tmp_path / "run"
    classifier = timm.create_model("pvt_v2_b0", num_classes=10)
    save_file(classifier.state_dict(), weights)
    keys = ["MODEL.TRANSFORMER.VARIANT", "timm:pvt_v2_b0.in1k", "MODEL.WEIGHTS", weights, "OUTPUT_DIR", output]
    keys += ["SOLVER.BASE_LR", "1e-30", "SOLVER.WARMUP_ITERS", "0", "SOLVER.IMS_PER_BATCH", "2", *SMALL["mask_rcnn"]]
    command = ["train_net.py", "--config-file", CONFIGS["mask_rcnn"]]
    for number, options in (("1", []), ("2", ["--resume"])):
        result = run_tool(*command, *options, *keys, "SOLVER.MAX_ITER", number, datasets_root=datasets_root)
        assert result.returncode == 0, result.stdout + result.stderr
    contents = read_checkpoint(output / "model_final.pth")
    assert contents["iteration"] == 1 and contents[METADATA_KEY]["variant"] == "timm:pvt_v2_b0.in1k"
    name = "stages.3.blocks.0.attn.q.weight"
    torch.testing.assert_close(contents["model"][f"backbone.bottom_up.net.model.{name}"], classifier.state_dict()[name])
    detectors = [Detector.load(output, device="cpu", score_threshold=0.0)]
    detectors[0].save_pretrained(tmp_path / "shared")
    detectors.append(Detector.from_pretrained(tmp_path / "shared", device="cpu", score_threshold=0.0))
    scores = [found([picture(70, 101)])[0].scores for found in detectors]
    assert len(scores[0]) and list(scores[0]) == pytest.approx(list(scores[1]), rel=1e-3)


def test_weights_that_do_not_fit(tmp_path):
    cfg, path = config(RESNET), tmp_path / "weights.pth"
    weights = timm.create_model("test_resnet").state_dict()
    for name in ("layer1.0.conv1.weight", "fc.weight"):
        torch.save({key: x for key, x in weights.items() if key != name}, path)
        assert name in message(check_weights, cfg, str(path)) and str(path) in message(check_weights, cfg, str(path))
    torch.save({"state_dict": {f"module.{key}": x for key, x in weights.items()}, "arch": "test_resnet"}, path)
    check_weights(cfg, str(path))
    assert "timm:test_convnext" in message(check_weights, config(CONVNEXT), str(path))


def test_pretrained_weights_of_a_tag(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / f"models--timm--{RESNET}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    weights = timm.create_model("test_resnet").state_dict()
    save_file(weights, repository / "snapshots" / ("0" * 40) / "model.safetensors")

    def start(name: str) -> dict[str, torch.Tensor]:
        cfg = config(name, "MODEL.PIXEL_MEAN", "[1.0, 2.0, 3.0]")
        model = build_model(cfg)
        Checkpointer(model, str(tmp_path), cfg=cfg).resume_or_load("", resume=True)
        return model.backbone.bottom_up.net.model.state_dict()

    torch.testing.assert_close(start(RESNET), {name: x for name, x in weights.items() if not name.startswith("fc.")})
    assert "the config has RGB with mean [1, 2, 3]" in caplog.text
    assert not torch.equal(start("test_resnet")["layer1.0.conv1.weight"], weights["layer1.0.conv1.weight"])
    assert "timm:test_resnet starts from random weights" in caplog.text
    error = message(start, "test_convnext.r160_in1k")
    assert "MODEL.WEIGHTS" in error and "test_convnext.r160_in1k" in error


def export(name: str, file_format: str, folder, *options: str):
    """Export a detector with random weights by the tool."""
    torch.manual_seed(0)
    few = ["MODEL.FPN.IN_FEATURES", "['stage2', 'stage3']", *FEW_LEVELS["retinanet"].split()]
    few += ["MODEL.RETINANET.SCORE_THRESH_TEST", "0.001"]
    cfg = config(name, *few, detector="retinanet")
    Checkpointer(build_model(cfg), str(folder), cfg=cfg).save("model")
    command = ["--config-file", CONFIGS["retinanet"], "--weights", folder / "model.pth"]
    command += ["--format", file_format, "--output", folder / "export", *options]
    return run_tool("export_model.py", *command, "MODEL.TRANSFORMER.VARIANT", f"timm:{name}", *SMALL["retinanet"], *few)


@pytest.mark.parametrize(
    "name, file_format", [(PVT, "onnx"), (CONVNEXT, "onnx"), (RESNET, "torchscript"), (VIT, "torchscript")]
)
@pytest.mark.slow
def test_exports(name, file_format, tmp_path):
    result = export(name, file_format, tmp_path)
    assert result.returncode == 0 and "equal" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_swin_is_exported_to_onnx_for_one_size(tmp_path):
    assert "--image-size" in error_line(export(SWIN, "onnx", tmp_path))
    result = export(SWIN, "onnx", tmp_path, "--image-size", "96", "128")
    assert result.returncode == 0 and "equal" in result.stdout, result.stdout + result.stderr
