"""The card of a shared detector: what it is, what it takes, how good it is, and under which licence."""

from collections.abc import Mapping
from pathlib import Path

from detectron2.config import CfgNode
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from projects_vil.checkpoint import Categories
from projects_vil.config import detector_name
from projects_vil.export import describe_report
from projects_vil.inference.sharing.proofs import Proofs

LIBRARY = "vil-detectron2"
_TEMPLATE = Path(__file__).with_suffix(".md")
_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
# detectron2's tasks as the hub names them.
_TASKS = {"bbox": "object-detection", "segm": "image-segmentation"}


def model_card(
    cfg: CfgNode,
    detector: nn.Module,
    categories: Categories,
    proofs: Proofs,
    *,
    license_id: str | None = None,
    place: str = "OWNER/NAME",
) -> ModelCard:
    """A card with front matter for the hub.

    Args:
        cfg: of the detector.
        detector: to count its parameters.
        categories: its classes.
        proofs: its evaluation and the reports on its exports.
        license_id: of the weights, as the hub names it; None where none is stated, and none is made up.
        place: what the example loads.
    """
    masks = cfg.MODEL.META_ARCHITECTURE != "RetinaNet" and cfg.MODEL.MASK_ON
    kind = detector_name(cfg)
    backbone = getattr(getattr(detector.backbone, "bottom_up", None), "variant", cfg.MODEL.BACKBONE.NAME)
    title = f"{kind}, {backbone}"
    evaluations = _detection_results(proofs)
    data = ModelCardData(
        library_name=LIBRARY,
        license=license_id,
        pipeline_tag=_TASKS["segm" if masks else "bbox"],
        tags=["detectron2", backbone],
        model_name=title if evaluations else None,
        eval_results=_front_matter(evaluations) or None,
    )
    node = cfg.MODEL.RETINANET if kind == "RetinaNet" else cfg.MODEL.ROI_HEADS
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=title,
        detector=kind,
        backbone=backbone,
        parameters=sum(parameter.numel() for parameter in detector.parameters()),
        place=place,
        masks=masks,
        channels=cfg.INPUT.FORMAT,
        short_side=cfg.INPUT.MIN_SIZE_TEST,
        longest_side=cfg.INPUT.MAX_SIZE_TEST,
        score_threshold=node.SCORE_THRESH_TEST,
        most=cfg.TEST.DETECTIONS_PER_IMAGE,
        classes=[(number, _cell(name)) for number, name in zip(categories.ids, categories.names, strict=True)],
        metrics=_METRICS,
        evaluations=evaluations,
        reports=[describe_report(report) for report in proofs.reports.values()],
    )


def _cell(text: str) -> str:
    """A text in a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _detection_results(proofs: Proofs) -> dict[str, dict[str, Mapping[str, object]]]:
    """dataset -> task -> metrics, of boxes and masks."""
    found = {
        name: {task: metrics for task, metrics in tasks.items() if task in _TASKS}
        for name, tasks in (proofs.evaluation or {}).items()
    }
    return {name: tasks for name, tasks in found.items() if tasks}


def _front_matter(evaluations: Mapping[str, Mapping[str, Mapping[str, object]]]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=_TASKS[task],
            dataset_type=name,
            dataset_name=name,
            metric_type=metric,
            metric_value=round(values[metric], 3),
        )
        for name, tasks in evaluations.items()
        for task, values in tasks.items()
        for metric in _METRICS
        if isinstance(values.get(metric), (int, float))
    ]
