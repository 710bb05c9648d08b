"""Deformable token merging in timm's Swin (LIT Table 4, "Swin-Ti + DTM").

Example:
    model = with_deformable_merging(timm.create_model("swin_tiny_patch4_window7_224"))
"""

import copy

from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn

from backbones import ConfigError
from backbones.layers.token_merging import DeformableTokenMerging


def with_deformable_merging(swin: nn.Module, *, norm: str = "BN") -> nn.Module:
    """Return a copy of timm's Swin with new deformable token merging modules (LIT Table 4, "Swin-Ti + DTM").

    The PVT-S of this table is in ``research/ablations.py``.

    Args:
        swin: A model such as ``timm.create_model("swin_tiny_patch4_window7_224")``, also with ``features_only=True``.
        norm: See :class:`DeformableTokenMerging`.

    Raises:
        ConfigError: If the model has no Swin token merging.
    """
    swin = copy.deepcopy(swin)
    names = [name for name, module in swin.named_modules() if isinstance(module, PatchMerging)]
    if not names:
        raise ConfigError(f"{type(swin).__name__} has no PatchMerging to replace. Pass a Swin model of timm.")
    for name in names:
        old = swin.get_submodule(name)
        new = _SwinMerging(old.dim, old.out_dim, norm=norm)
        parent, _, attribute = name.rpartition(".")
        setattr(swin.get_submodule(parent), attribute, new.to(old.reduction.weight))
    return swin.train(swin.training)


class _SwinMerging(DeformableTokenMerging):
    def forward(self, tokens: Tensor) -> Tensor:
        """Return the merged tokens (B, ceil(H / 2), ceil(W / 2), D) of tokens (B, H, W, C)."""
        return super().forward(tokens.permute(0, 3, 1, 2))
