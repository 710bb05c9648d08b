"""Tests of all families: feature maps of images of any size, gradients, precision, training, traces and exports."""

import dataclasses
import functools
import io

import numpy as np
import pytest
import torch
import torch.fx.experimental._config as symbolic_config
from torch import nn
from torch.export import Dim

from backbones.attention import dense
from backbones.backbone import Backbone, BackboneSettings
from backbones.layers.token_merging import DeformableTokenMerging
from backbones.vil import ViL
from tests.backbones import helpers
from tests.backbones.families import LITS, VARIANTS, small_classifier, small_lit, small_model
from tests.backbones.helpers import (
    FAMILIES,
    LargestTensor,
    assert_all_close,
    random_images,
    randomize,
    small_vil,
    trace,
)
from tests.selection import slow_except

MECHANISMS = ["absolute", "relative", "two_globals", "separate", "exact", "dense_relative", "long_short", "partial"]
MECHANISMS = [*(f"vil_{name}" for name in MECHANISMS), "lit_absolute", "lit_relative", "litv2", "cvt"]
models = pytest.mark.parametrize("name", slow_except(VARIANTS, MECHANISMS))
# One trace per family runs with TorchScript's optimizer.
OPTIMIZED = ("vil_relative", "lit_relative", "litv2", "cvt")
varied = pytest.mark.parametrize("name", [*OPTIMIZED, "vil_cyclic", "vil_partial", "vil_long_short", "lit_absolute"])
one_of_each = pytest.mark.parametrize("name", ["vil_absolute", "lit_relative", "cvt"])
SIZES = [(37, 50), (64, 64), (64, 33), (61, 130), (5, 9)]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@models
def test_maps_of_any_size(name):
    model, stages = small_model(name), VARIANTS[name].stages
    reference = small_model(name, attention_backend="reference")
    reference.load_state_dict(model.state_dict(), strict=True)
    infos = {f"stage{i + 1}": (stage.dim, 4 * 2**i) for i, stage in enumerate(stages)}
    assert {stage: (info.channels, info.stride) for stage, info in model.feature_info.items()} == infos
    for height, width in SIZES:
        features = model(random_images(2, 3, height, width))
        expected = {n: (2, dim, -(-height // stride), -(-width // stride)) for n, (dim, stride) in infos.items()}
        assert {stage: tuple(feature.shape) for stage, feature in features.items()} == expected
        assert_all_close(features, reference(random_images(2, 3, height, width)), tolerance=1e-11)


@models
def test_output_of_an_image_ignores_its_batch_and_padding_within_a_patch(name):
    """The model pads the image with zeros, below and on the right, to whole patches."""
    model, images = small_model(name), random_images(2, 3, 37, 50)
    together = model(images)
    padded = torch.zeros(2, 3, 40, 52, dtype=torch.float64)
    padded[:, :, :37, :50] = images
    for index in range(2):
        alone = model(padded[index : index + 1])
        assert_all_close({n: m[index : index + 1] for n, m in together.items()}, alone, tolerance=1e-10)


@models
def test_a_batch_of_no_images(name):
    """Feature maps are empty, gradients are zero, and statistics stay finite."""
    model = small_model(name).train()
    features = model(random_images(0, 3, 37, 50))
    for stage, info in model.feature_info.items():
        assert features[stage].shape == (0, info.channels, -(-37 // info.stride), -(-50 // info.stride))
    sum(feature.square().sum() for feature in features.values()).backward()
    assert all(x.grad.eq(0).all() for x in model.parameters() if x.grad is not None)
    assert all(x.isfinite().all() for x in model.state_dict().values())
    assert small_classifier(name).train()(random_images(0, 3, 64, 64)).shape == (0, 5)
    with torch.inference_mode():
        assert all(len(feature) == 0 for feature in model.eval()(random_images(0, 3, 37, 50)).values())


@one_of_each
def test_out_features_selects_the_stages(name):
    """Stages after the last one are not built."""
    whole, images = small_model(name), random_images(1, 3, 37, 50)
    expected = whole(images)
    for names, number in ((("stage1", "stage3"), 3), (("stage2",), 2)):
        part = small_model(name, out_features=names)
        assert len(part.stages) == number and tuple(part.feature_info) == names
        part.load_state_dict({key: t for key, t in whole.state_dict().items() if key in part.state_dict()})
        assert_all_close(part(images), {stage: expected[stage] for stage in names}, tolerance=1e-11)


@one_of_each
def test_forward_changes_only_batch_statistics(name):
    model = small_model(name).train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model(random_images(2, 3, 70, 90))
    changed = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed == {key for key in before if key.endswith(STATISTICS)}
    assert bool(changed) == (name != "vil_absolute")


@varied
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.float16, 3e-2), (torch.bfloat16, 2e-1)])
def test_lower_precision(name, dtype, tolerance):
    if name.startswith("lit"):
        tolerance = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}[dtype]
    images = random_images(1, 3, 37, 50)
    expected = small_model(name)(images)
    for stage, feature in small_model(name).to(dtype)(images.to(dtype)).items():
        assert feature.dtype == dtype
        assert (feature.double() - expected[stage]).abs().max() <= tolerance * expected[stage].abs().max()


@varied
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains(name, dtype):
    model, images = small_model(name).float(), random_images(2, 3, 37, 50, dtype=torch.float32)
    expected = model(images)
    with torch.autocast("cpu", dtype):
        for stage, feature in model(images).items():
            assert (feature - expected[stage]).abs().max() <= 0.3 * expected[stage].abs().max()
        features = model.train()(images)
    sum(feature.float().square().mean() for feature in features.values()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def without_gradient(gradients: dict) -> set[str]:
    """Return the names without gradients above rounding. The bias of the dynamic projection cancels in its softmax."""
    idle = {name for name, gradient in gradients.items() if gradient is None or not gradient.abs().max() > 1e-11}
    return {name for name in idle if not name.endswith("dynamic_projection.bias")}


def assert_only_weights_decay(model: nn.Module) -> None:
    """Check that only the weights of linear layers and convolutions have weight decay."""
    types = (nn.Linear, nn.Conv2d, DeformableTokenMerging)
    decaying = {f"{key}.weight" for key, module in model.named_modules() if isinstance(module, types)}
    names = {key for key, _ in model.named_parameters()}
    assert decaying < names and model.no_weight_decay() == names - decaying


@models
def test_every_parameter_gets_a_gradient(name):
    model, images = small_model(name), random_images(2, 3, 70, 90)
    assert_only_weights_decay(model)
    norms = [key for key, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    for training in (True, False) if norms else (True,):
        gradients = helpers.map_gradients(model.train(training), images)
        # BatchNorm cancels the bias of the layer before it.
        idle = {f"{key.removesuffix('.norm')}.bias" for key in norms} if training else set()
        assert without_gradient(gradients) == idle & gradients.keys()
        assert all(gradient.isfinite().all() for gradient in gradients.values())
    classifier = small_classifier(name)
    assert_only_weights_decay(classifier)
    logits = classifier(images)
    assert logits.shape == (2, 5)
    (logits * torch.arange(10).view(2, 5)).sum().backward()
    assert not without_gradient({key: parameter.grad for key, parameter in classifier.named_parameters()})


def test_layers_count_blocks():
    """``test_feature_maps_and_logits`` tests the order of the feature maps. This test adds offsets and output norms."""
    layers = {
        **{"stages.0.patch_embed.": 0, "stages.0.blocks.0.": 1, "stages.1.": 2, "output_norms.stage2.": 2},
        **{"stages.2.patch_embed.offset.": 3, "stages.2.blocks.0.": 3, "stages.2.blocks.1.": 4},
        **{"output_norms.stage3.": 4, "stages.3.": 5, "output_norms.stage4.": 5},
    }
    model = small_model("lit_relative")
    names = [key for key, _ in model.named_parameters()]
    found = {start: {model.layer_id(key) for key in names if key.startswith(start)} for start in layers}
    assert found == {start: {layer} for start, layer in layers.items()} and model.num_layers == 5
    assert small_model("vil_absolute", out_features=("stage2",)).num_layers == 3


@varied
def test_activation_checkpointing_changes_no_gradient_and_no_statistics(name):
    images, results, kept = random_images(4, 3, 37, 50), [], []
    for checkpointing in (False, True):
        model, sizes = small_model(name, drop_path_rate=0.5, activation_checkpointing=checkpointing).train(), []
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            gradients = helpers.map_gradients(model, images)
        # A block has no gradient if its path is dropped for all images.
        results.append({k: g for k, g in gradients.items() if g is not None} | dict(model.named_buffers()))
        kept.append(sum(sizes))
    assert_all_close(results[1], results[0], tolerance=1e-11)
    assert kept[1] < kept[0]


@varied
def test_weights_that_are_cast_together_train_as_with_autocast_alone(name, monkeypatch):
    images, results = random_images(2, 3, 37, 50).float(), []
    for _ in range(2):
        model = small_model(name, drop_path_rate=0.5).float().train()
        model.get_parameter("stages.2.blocks.0.mlp.fc1.weight").requires_grad_(False)
        parameters = dict(model.named_parameters())
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            maps = model(images)
        sum(x.float().square().sum() for x in maps.values()).backward()
        after = dict(model.named_parameters())
        assert all(parameter is after[key] for key, parameter in parameters.items())
        results.append(maps | {key: x.grad for key, x in parameters.items() if x.grad is not None})
        monkeypatch.setattr("backbones.backbone.call_block", lambda block, *inputs: block(*inputs))
    # If a weight were cast to another dtype, or a gradient were lost, the difference would be larger.
    assert results[0].keys() == results[1].keys()
    for key, expected in results[1].items():
        assert (results[0][key] - expected).abs().max() <= 0.05 * expected.abs().max(), key


@pytest.mark.parametrize("name", ["lit_relative", "cvt"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_frozen_stages_keep_weights_and_statistics(name, number):
    model = small_model(name, drop_path_rate=0.5).train()
    model.freeze_stages(number)
    for _ in range(2):
        before = {key: buffer.clone() for key, buffer in model.named_buffers()}
        features = model(random_images(8, 3, 64, 80))
        if any(feature.requires_grad for feature in features.values()):
            sum(feature.square().sum() for feature in features.values() if feature.requires_grad).backward()
        for key, parameter in model.named_parameters():
            if not key.startswith("output_norms") and int(key.split(".")[1]) < number:
                assert parameter.grad is None and not parameter.requires_grad, key
        for key, buffer in model.named_buffers():
            assert torch.equal(buffer, before[key]) == (int(key.split(".")[1]) < number), key
        # As trainers do after an evaluation
        model.eval().train()
    assert [stage.training for stage in model.stages] == [index >= number for index in range(len(model.stages))]


@pytest.mark.parametrize("name", slow_except(VARIANTS, ["vil_relative", "lit_relative"]))
def test_trace_is_correct_for_other_sizes(name):
    model = small_model(name)
    # Fusing a traced graph takes half of the time, so only one model per family is optimized.
    with torch.jit.optimized_execution(name in OPTIMIZED):
        traced = trace(model, (random_images(1, 3, 96, 64),))
        for batch, height, width in ((1, 37, 50), (2, 20, 90), (1, 8, 5), (2, 130, 70)):
            images = random_images(batch, 3, height, width)
            assert_all_close(traced(images), model(images), tolerance=1e-10)


# Square, portrait and landscape; feature maps smaller than a window, and sizes that are no multiples of a stride.
EXPORT_SIZES = ((32, 32), (64, 64), (32, 160), (160, 96), (96, 352), (416, 64), (45, 70), (131, 57))
LARGEST = {"max_img_size": (1344, 1344)}
MIXED = {"attention": ("sliding_chunk", "long_short") * 2, "global_tokens": 2, "relative_bias": True}


def vil(sizes: tuple[tuple[int, int], ...] = ((32, 2),), **options) -> Backbone:
    """Return a variant with stages of these patch sizes and depths. Fewer stages are exported faster."""
    variant = helpers.small_variant(**options)
    stages = zip(variant.stages, sizes, strict=False)
    stages = tuple(dataclasses.replace(stage, patch_size=patch, depth=depth) for stage, (patch, depth) in stages)
    return randomize(ViL(dataclasses.replace(variant, stages=stages), BackboneSettings(**LARGEST))).double().eval()


def lit(family: str, *out_features: str, **options) -> Backbone:
    stages = tuple(dataclasses.replace(stage, depth=1) for stage in LITS[family].stages)
    variant = dataclasses.replace(LITS[family], stages=stages).with_options(**options)
    return small_lit(variant, **LARGEST, out_features=out_features or None)


ONNX = {
    "cvt": lambda: small_model("cvt", out_features=("stage1", "stage2")),
    "mixed": lambda: vil(((4, 1), (8, 2)), **MIXED),
    "cyclic": lambda: vil(**FAMILIES["cyclic"]),
    "lit_absolute": lambda: lit("absolute"),
    "lit_relative": lambda: lit("relative", "stage2", "stage3"),
    "litv2": lambda: small_model("litv2"),
    "dense_relative": lambda: small_vil("dense_relative", **LARGEST, out_features=("stage2",)),
}
OTHERS = ("absolute", "separate", "exact", "global")
EXPORTED = ONNX | {
    **{name: functools.partial(vil, **FAMILIES[name]) for name in OTHERS},
    "lit_relative_load": lambda: lit("relative", token_merging="uniform", position_interpolation="once"),
    "spatial_reduction": lambda: small_vil("spatial_reduction", **LARGEST),
    "performer": lambda: small_vil("performer", **LARGEST),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_backbone_is_correct_for_other_sizes(name):
    """Run in torch, which checks the guards of the program at each size, and in onnxruntime."""
    dtype = torch.float32 if name in ONNX else torch.float64
    model = EXPORTED[name]().to(dtype)
    for module in model.modules():
        if isinstance(module, dense.DenseAttention) and module.relative_bias is not None:
            # These small feature maps would fit into one group.
            module.num_groups = 3
    dynamic = {0: Dim("batch", min=1), 2: Dim("height", min=32, max=1344), 3: Dim("width", min=32, max=1344)}
    with torch.no_grad(), symbolic_config.patch(backed_size_oblivious=True):
        example = (random_images(2, 3, 96, 160, dtype=dtype),)
        program = torch.export.export(model, example, dynamic_shapes=(dynamic,), strict=False)
    module, session = program.module(), onnx_session(program) if name in ONNX else None
    for height, width in EXPORT_SIZES:
        images = random_images(1 + height % 2, 3, height, width, dtype=dtype)
        with torch.no_grad():
            actual, expected = module(images), model(images)
        assert actual.keys() == expected.keys()
        in_onnx = session.run(None, {session.get_inputs()[0].name: np.asarray(images)}) if session else []
        for outputs, tolerance in (
            (actual.values(), 1e-3 if session else 1e-10),
            (map(torch.from_numpy, in_onnx), 1e-3),
        ):
            for output, feature in zip(outputs, expected.values(), strict=bool(session)):
                assert output.shape == feature.shape
                assert (output - feature).abs().max() < tolerance * feature.abs().max()
    if name == "lit_relative":
        images = random_images(1, 3, 640, 640, dtype=dtype)
        with torch.no_grad(), LargestTensor() as largest:
            module(images)
        assert largest.numel < LITS["relative"].stages[2].heads * 40**4 / 2


# One attention block per family: most of the time goes into expressions of sizes, which grow with the depth. Then the
# axis of variable size, and the size of the second image. The graph depends on which feature maps are padded.
COMPILED = {
    "vil": (lambda: vil(((4, 1),), **FAMILIES["relative"]), 2, 38),
    "long_short": (lambda: vil(((4, 1),), **FAMILIES["long_short"]), 3, 38),
    "lit": (lambda: lit("relative", "stage3"), 2, 46),
    "litv2": (lambda: small_model("litv2", out_features=("stage3",)), 2, 46),
    "cvt": (lambda: small_model("cvt", out_features=("stage1",)), 3, 38),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_models_compile_without_graph_breaks_for_any_size(name):
    """There is one forward graph and one backward graph for images of any height and width."""
    create, axis, other_size = COMPILED[name]
    model, compiled = create(), create()
    compiled.compile(backend="aot_eager", fullgraph=True)
    for size in (61, other_size):
        images = random_images(2, 3, *((size, 74) if axis == 2 else (74, size)))
        # A graph for one size only is an error.
        torch._dynamo.mark_dynamic(images, axis)
        gradients, maps = helpers.map_gradients(compiled, images), compiled(images)
        assert_all_close(maps, model(images), tolerance=1e-10)
        assert_all_close(gradients, helpers.map_gradients(model, images), tolerance=1e-9)


def onnx_session(program: torch.export.ExportedProgram):
    """Return a session of onnxruntime. The test is skipped if a package is missing."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    onnxruntime = pytest.importorskip("onnxruntime")
    file, options = io.BytesIO(), onnxruntime.SessionOptions()
    with torch.no_grad(), symbolic_config.patch(backed_size_oblivious=True):
        torch.onnx.export(program, dynamo=True, optimize=True, verbose=False).save(file)
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
