"""What is known of the detector that is shared, beside its weights: its evaluation, and what became of its exports."""

import json
from dataclasses import dataclass
from pathlib import Path

from backbones import InputError
from projects_vil.evaluation import read_results
from projects_vil.inference.sharing.published import names_a_place

REPORTS = "*.report.json"


@dataclass(frozen=True)
class Proofs:
    """What belongs to a detector, to the bit of its weights and to its settings.

    Attributes:
        evaluation: dataset -> task -> metric, as in ``evaluation.json``; None where there is none of this detector.
        reports: file name -> a report of ``tools/export_model.py``.
        left_out: what was found and is of another detector, or cannot be shared, a line each.
    """

    evaluation: dict[str, dict[str, dict[str, object]]] | None
    reports: dict[str, dict]
    left_out: tuple[str, ...]


def find_proofs(folder: Path, model: str) -> Proofs:
    """Look for them beside the weights, and in the folders there, where exports lie.

    Args:
        folder: of the weights.
        model: the fingerprint of the detector.
    """
    left_out: list[str] = []
    return Proofs(_evaluation(folder, model, left_out), _reports(folder, model, left_out), tuple(left_out))


def _evaluation(folder: Path, model: str, left_out: list[str]) -> dict[str, dict[str, dict[str, object]]] | None:
    try:
        evaluation = read_results(folder, model=model)
    except InputError as error:
        left_out.append(str(error))
        return None
    if evaluation is not None and names_a_place(list(evaluation)):
        left_out.append(f"the evaluation in {folder} is of a dataset that has a path for its name")
        return None
    return evaluation


def _reports(folder: Path, model: str, left_out: list[str]) -> dict[str, dict]:
    found: dict[str, dict] = {}
    of_others = []
    for path in sorted([*folder.glob(REPORTS), *folder.glob(f"*/{REPORTS}")]):
        try:
            report = json.loads(path.read_text())
        except (OSError, ValueError):
            report = None
        if not isinstance(report, dict) or report.get("fingerprint") != model:
            of_others.append(path.relative_to(folder).as_posix())
        elif names_a_place(report):
            left_out.append(f"{path} has a path in it")
        elif path.name in found:
            left_out.append(f"{path}: another report of that name is taken")
        else:
            found[path.name] = report
    if of_others:
        kind = "is no report" if len(of_others) == 1 else "are no reports"
        left_out.append(f"{', '.join(of_others)} in {folder} {kind} on these weights with these settings: export again")
    return found
