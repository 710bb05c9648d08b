"""A classifier as timm's scripts and users know one."""

from collections.abc import Sequence

import torch.nn.functional as F
from timm.layers import Format
from timm.models import FeatureInfo
from torch import Tensor, nn

from backbones.attention.dense import join_tokens
from backbones.backbone import Classifier, init_linear
from backbones.build import create_classifier, height_and_width
from backbones.timm_api.stages import check_in_chans, chosen_stages, set_checkpointing, stage_info
from backbones.timm_api.training import Redraw, Shift, slow_offsets
from backbones.utils.errors import InputError
from backbones.variants import get_variant

_POOLS = {"mean": "avg", "global_token": "token"}


class TimmClassifier(Classifier):
    """:func:`.create_classifier`'s model, with what timm's scripts and users ask of a model.

    Args:
        name: one of :func:`.list_variants`.
        num_classes: of the head; 0 for none.
        in_chans: 3.
        img_size: as for :func:`.create_classifier`; None for the variant's own.
        global_pool: the variant's own, ``"avg"`` or ``"token"``, which None stands for, or ``""`` for none: the head
            is then that of each token.
        drop_rate: dropout before the head; the papers have none.
        redraw_epoch_length: iterations of an epoch, for a Performer that redraws its random features in training every
            1 + 5T iterations of epoch T (ViL appendix D); None to keep those that it has. An iteration is a forward
            pass in training mode.
        redraw_first_epoch: T of the first iteration: of a resumed run, the epoch that it resumes at.
        random_shift_iterations: how many iterations, from the first, ViL's local attention sees one neighbouring chunk,
            drawn anew for each layer and iteration (:mod:`.attention.random_shift`); 0.875 of all in the official code.
        random_shift_first_iteration: of a resumed run, the iteration that it resumes at.
        options: of :func:`.create_classifier`.

    Raises:
        InputError: for what these models do not have.
    """

    def __init__(
        self,
        name: str,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | Sequence[int] | None = None,
        global_pool: str | None = None,
        drop_rate: float = 0.0,
        redraw_epoch_length: int | None = None,
        redraw_first_epoch: int = 0,
        random_shift_iterations: int = 0,
        random_shift_first_iteration: int = 0,
        **options: object,
    ) -> None:
        check_in_chans(name, in_chans)
        _check_num_classes(num_classes)
        if isinstance(drop_rate, bool) or not isinstance(drop_rate, int | float) or not 0 <= drop_rate < 1:
            raise InputError(f"drop_rate={drop_rate!r}: it is at least 0 and below 1")
        img_size = get_variant(name).classifier_img_size if img_size is None else img_size
        made = create_classifier(name, num_classes=max(num_classes, 1), img_size=img_size, **options)
        super().__init__(made.backbone, num_classes=max(num_classes, 1), pool=made.pool, norm_eps=made.norm.eps)
        self.num_features = self.head_hidden_size = self.head.in_features
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.feature_info = stage_info(made.backbone.variant, range(len(made.backbone.stages)))
        self.global_pool = self._checked_pool(_POOLS[self.pool] if global_pool is None else global_pool)
        self.num_classes = num_classes
        if not num_classes:
            self.head = nn.Identity()
        if redraw_epoch_length is not None:
            self.register_forward_pre_hook(Redraw(name, self, redraw_epoch_length, redraw_first_epoch))
        if random_shift_iterations or random_shift_first_iteration:
            self.register_forward_pre_hook(Shift(name, self, random_shift_iterations, random_shift_first_iteration))
        slow_offsets(self)

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of stages beside the tokens of :meth:`forward_features`, in the form of timm's models.

        Args:
            images: (B, 3, H, W).
            indices: stages as ``out_indices`` of :class:`TimmFeatures`, whose norms of LIT's maps a classifier lacks.
            norm: apply the norm to the last stage's map too.
            stop_early: leave out the stages after the last one asked for; the tokens are then its own, without norm.
            output_fmt: ``"NCHW"``.
            intermediates_only: return the maps alone.

        Raises:
            InputError: for another format, or a stage that the model does not have.
        """
        if output_fmt != Format.NCHW:
            raise InputError(f"output_fmt={output_fmt!r}: maps are 'NCHW'")
        stages = self.backbone.stages
        chosen = chosen_stages("indices", indices, len(stages), "the model")
        maps, intermediates, global_tokens = images, [], None
        for index, stage in enumerate(stages[: chosen[-1] + 1] if stop_early else stages):
            tokens, global_tokens = stage(maps)
            maps, is_last = tokens.permute(0, 3, 1, 2), index + 1 == len(stages)
            if index in chosen:
                intermediates.append(self.norm(tokens).permute(0, 3, 1, 2) if norm and is_last else maps)
        if intermediates_only:
            return intermediates
        tokens = join_tokens(tokens, global_tokens)
        return self.norm(tokens) if is_last else tokens, intermediates

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens of :meth:`forward_features` -> logits (B, num_classes), or what the head takes (B, C).

        Without pooling both are those of each token: (B, G + H' W', ...).
        """
        pooled = F.dropout(self.pooled(tokens) if self.global_pool else tokens, self.drop_rate, self.training)
        return pooled if pre_logits else self.head(pooled)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, num_classes), or of each token where there is no pooling."""
        return self.forward_head(self.forward_features(images))

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for ``num_classes``, or none for 0.

        Args:
            num_classes: of the head.
            global_pool: as when the model is made; None to leave it as it is.

        Raises:
            InputError: for a number or a pooling that there is not.
        """
        _check_num_classes(num_classes)
        if global_pool is not None:
            self.global_pool = self._checked_pool(global_pool)
        self.num_classes = num_classes
        if num_classes:
            weight = next(self.backbone.parameters())
            self.head = nn.Linear(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
            self.head.apply(init_linear)
            self.head.train(self.training)
        else:
            self.head = nn.Identity()

    def _checked_pool(self, global_pool: str) -> str:
        own = _POOLS[self.pool]
        if global_pool not in (own, ""):
            raise InputError(f"global_pool={global_pool!r}: this variant pools by {own!r}, or '' is for no pooling")
        return global_pool

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the maps of ``indices`` do not need, as timm's models do.

        Args:
            indices: stages, as for :meth:`forward_intermediates`; the ones after the last of them go, and the norm and
                the head of the last stage with them.
            prune_norm: drop the norm in any case.
            prune_head: drop head and pooling in any case; :meth:`reset_classifier` makes others.

        Returns:
            The numbers of the stages that were asked for, from 0.

        Raises:
            InputError: for a stage that the model does not have.
        """
        number = len(self.backbone.stages)
        chosen = chosen_stages("indices", indices, number, "the model")
        kept = chosen[-1] + 1
        if prune_norm or kept < number:
            self.norm = nn.Identity()
        if kept < number:
            self.backbone.keep_stages(kept)
            # Stages before the last one have no global tokens at their end.
            self.pool = "mean"
            self.feature_info = FeatureInfo(self.feature_info.info[:kept], tuple(range(kept)))
            self.num_features = self.head_hidden_size = self.feature_info.channels()[-1]
        if prune_head or kept < number:
            self.reset_classifier(0, "")
        return chosen

    def set_input_size(
        self, img_size: int | Sequence[int] | None = None, patch_size: int | Sequence[int] | None = None
    ) -> None:
        """Make the model one for images of another size: tables of positions are resized as at loading.

        Parameters stay the same objects, so that an optimizer still has them; what it remembers of a resized one does
        not fit any more.

        Args:
            img_size: a side, or height and width, in pixels; None for no change.
            patch_size: the model's own, or None.

        Raises:
            InputError: for another size of patches, and for a model that is tied to its size, Linformer; it is as
                before then.
        """
        step = self.backbone.variant.steps[0]
        if patch_size is not None and height_and_width("patch_size", patch_size) != (step, step):
            raise InputError(f"patch_size={patch_size!r}: the patches of this model are of {step}, and stay so")
        if img_size is None:
            return
        size = height_and_width("img_size", img_size)
        self.backbone.set_img_size(size)
        # What timm saves beside weights, and reads for its transforms
        for record in ("_traits", "_model_args"):
            if hasattr(self, record):
                setattr(self, record, {**getattr(self, record), "img_size": size})

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the activations of a block again in the backward pass."""
        set_checkpointing(self.backbone, enable)

    def group_matcher(self, coarse: bool = False) -> dict:
        """For timm's layer-wise decay of learning rates: a group a block, or a stage."""
        blocks = [(r"^backbone\.stages\.(\d+)\.blocks\.(\d+)", None), (r"^backbone\.stages\.(\d+)", (-1,))]
        return {
            "stem": r"^backbone\.stages\.0\.(?!blocks)",
            "blocks": r"^backbone\.stages\.(\d+)" if coarse else [*blocks, (r"^norm", (99999,))],
        }


def _check_num_classes(num_classes: int) -> None:
    if type(num_classes) is not int or num_classes < 0:
        raise InputError(f"num_classes={num_classes!r}: it is a whole number, 0 for no head")
