"""GPU work of backbones in a training step, compared with Swin-T: kernel launches, memory, and no host waits."""

import json

import pytest

TRITON = {"attention_backend": "triton"}
# Keywords of create_backbone, and limits for launches and for memory as multiples of Swin-T.
CASES = {
    "vil_tiny_rpb": ({"name": "vil_tiny_rpb"}, 1.28, 0.44),
    "vil_small_rpb": ({"name": "vil_small_rpb"}, 1.28, 0.9),
    "vil_small": ({"name": "vil_small"}, 1.1, 0.9),
    "ls_small": ({"name": "ls_small"}, 1.11, 0.85),
    "ls_small, long-short everywhere": ({"name": "ls_small", "attention": "long_short"}, 1.36, 0.89),
    "lit_s": ({"name": "lit_s"}, 0.85, 0.63),
    "lit_ti": ({"name": "lit_ti"}, 0.66, 0.55),
    "litv2_s": ({"name": "litv2_s"}, 0.79, 0.65),
    "litv2_s_ws4": ({"name": "litv2_s_ws4"}, 0.81, 0.66),
    "cvt_ls_13": ({"name": "cvt_ls_13"}, 1.5, 1.0),
    "vil_small_rpb, checkpointing": ({"name": "vil_small_rpb", "activation_checkpointing": True}, 1.68, 0.52),
    "ls_small, checkpointing": ({"name": "ls_small", "activation_checkpointing": True}, 1.42, 0.43),
    "lit_s, checkpointing": ({"name": "lit_s", "activation_checkpointing": True}, 1.05, 0.4),
    "litv2_s, checkpointing": ({"name": "litv2_s", "activation_checkpointing": True}, 0.96, 0.27),
    "cvt_ls_13, checkpointing": ({"name": "cvt_ls_13", "activation_checkpointing": True}, 2.0, 0.33),
    "vil_tiny_rpb, triton": ({"name": "vil_tiny_rpb", **TRITON}, 0.93, 0.33),
    "vil_small_rpb, triton": ({"name": "vil_small_rpb", **TRITON}, 0.93, 0.66),
    "ls_small, triton": ({"name": "ls_small", **TRITON}, 0.88, 0.68),
    "ls_small, long-short everywhere, triton": ({"name": "ls_small", "attention": "long_short", **TRITON}, 1.1, 0.71),
    "lit_s, triton": ({"name": "lit_s", **TRITON}, 0.6, 0.53),
    "cvt_ls_13, triton": ({"name": "cvt_ls_13", **TRITON}, 1.22, 0.84),
}


@pytest.mark.slow
def test_launches_memory_and_waits_of_backbones(run_on_mock):
    options = {name: keywords for name, (keywords, _, _) in CASES.items()}
    counts = json.loads(run_on_mock("count_backbones.py", json.dumps(options)).splitlines()[-1])
    # The host reads its result.
    number, _, waits = counts.pop("a sum")
    assert number and any(place.startswith("tests/gpu_counts/count_backbones.py:") for place in waits)
    launches, memory, _ = counts.pop("swin_t")
    ratios = {name: (own / launches, peak / memory, waits) for name, (own, peak, waits) in counts.items()}
    # The table of docs/performance.md, by pytest -s
    print(f"swin_t: {launches} launches, {memory / 2**30:.2f} GB")
    print(*(f"{name}: {ratio[0]:.2f} x launches, {ratio[1]:.2f} x memory" for name, ratio in ratios.items()), sep="\n")
    above = {
        name: ratio
        for name, ratio in ratios.items()
        if not (0.3 < ratio[0] <= CASES[name][1] and 0.2 < ratio[1] <= CASES[name][2] and not ratio[2])
    }
    assert not above
