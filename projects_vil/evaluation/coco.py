"""COCO's metrics by faster-coco-eval, which computes pycocotools' own in C++."""

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

from detectron2.evaluation import COCOEvaluator

from backbones import InputError
from backbones.utils.errors import check_choice

COCO_APIS = ("pycocotools", "faster_coco_eval")


def check_coco_api(name: str) -> None:
    """Whether ``TEST.COCO_API`` is one of ``COCO_APIS``, and installed.

    Raises:
        InputError: where not.
    """
    check_choice("TEST.COCO_API", name, COCO_APIS)
    if importlib.util.find_spec(name) is None:
        raise InputError(f"TEST.COCO_API is {name}, which is not installed: pip install -e '.[eval]'")


class FasterCOCOEvaluator(COCOEvaluator):
    """detectron2's, with the metrics of boxes and masks by faster-coco-eval.

    The same numbers as by pycocotools, in a fraction of the time; the file of results is the same too.
    """

    def _eval_predictions(self, predictions: list[dict[str, Any]], img_ids: list[int] | None = None) -> None:
        """As the parent's, which names pycocotools itself."""
        results = list(itertools.chain.from_iterable(entry["instances"] for entry in predictions))
        to_contiguous = getattr(self._metadata, "thing_dataset_id_to_contiguous_id", None)
        if to_contiguous is not None:
            to_dataset = {contiguous: dataset for dataset, contiguous in to_contiguous.items()}
            for result in results:
                result["category_id"] = to_dataset[result["category_id"]]
        if self._output_dir:
            (Path(self._output_dir) / "coco_instances_results.json").write_text(json.dumps(results))
        if not self._do_evaluation:
            self._logger.info("Annotations are not available for evaluation.")
            return
        names = self._metadata.get("thing_classes")
        for task in sorted(self._tasks or self._tasks_from_predictions(results)):
            judged = self._judge(results, task, img_ids) if results else None
            self._results[task] = self._derive_coco_results(judged, task, class_names=names)

    def _judge(self, results: list[dict[str, Any]], task: str, img_ids: list[int] | None) -> object:
        # Imported when it is asked for: it need not be installed.
        from faster_coco_eval import COCO, COCOeval_faster

        if task == "segm":
            # Else the boxes' areas, not the masks', say which objects are small.
            results = [{key: value for key, value in result.items() if key != "bbox"} for result in results]
        truth = COCO()
        truth.dataset = self._coco_api.dataset
        truth.createIndex()
        judge = COCOeval_faster(truth, truth.loadRes(results), task)
        judge.params.maxDets = self._max_dets_per_image
        if img_ids is not None:
            judge.params.imgIds = img_ids
        judge.run()
        return judge
