"""Write docs/faults.md: run every fault and note what is printed.

Example:
    python -m tests.faults.document
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.fault import Fault, Outcome, happen
from tests.faults.matrix import MATRIX
from tests.faults.world import make_world
from tests.projects_vil.helpers import ROOT

PATH = ROOT / "docs/faults.md"
HEAD = """# Faults, and what is printed

{number} faults in data, checkpoints, configs, processes, disks, prediction and sequences. Each is injected into real files or a real process.
The tool has to end with the exit status and with the one line that are shown, without a traceback; every file that was there
before is there after it, unchanged but for the logs and results of a run that goes on, and nothing half-written stays. The faults
are in `tests/faults`: `make test` runs those that end before anything is trained, exported or predicted, `make test-slow` the
others, and `make faults` runs all and writes this page. "File too large" stands for a full disk, which is "no space is left".

`small.yaml` and `mask.yaml` are the demo's RetinaNet and Mask R-CNN, smaller; `own/` is a COCO file with its images, `run/` a
finished run and `export/` its export. `bad.yaml` and other files that are wrong hold what the first column says.
"""  # noqa: E501


def row(fault: Fault, outcome: Outcome) -> str:
    """A line of a table of docs/faults.md."""
    shown = [f"`` {text} ``".replace("|", "\\|") for text in (fault.command, outcome.line.strip() or "?")]
    return f"| {fault.name.replace('|', '/')} | {shown[0]} | {shown[1]} | {outcome.status} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "world").mkdir()
        make_world(folder / "world")
        faults = [fault for part in MATRIX.values() for fault in part]

        num_wrong = 0

        def line(numbered: tuple[int, Fault]) -> str:
            nonlocal num_wrong
            number, fault = numbered
            try:
                outcome = happen(fault, folder / "world", folder / f"fault_{number}")
            except AssertionError as error:
                print(f"{fault.name}: {error}", file=sys.stderr)
                num_wrong += 1
                outcome = Outcome("?", False, 0, "", (), ())
            wrong = outcome.complaints(fault)
            if wrong:
                num_wrong += 1
                print(f"{fault.name}: {fault.command}\n    {wrong}\n{outcome.output}", file=sys.stderr)
            return row(fault, outcome)

        with ThreadPoolExecutor(2) as pool:
            lines = iter(list(pool.map(line, enumerate(faults))))
    if num_wrong:
        sys.exit(f"{PATH} stays as it is: {num_wrong} faults do not end as they should")
    parts = [HEAD.format(number=len(faults))]
    for title, of_it in MATRIX.items():
        parts.append(
            f"\n## {title}\n\n| what is wrong | command | what is printed | exit status |\n|---|---|---|---|\n"
        )
        parts += [f"{next(lines)}\n" for _ in of_it]
    PATH.write_text("".join(parts), encoding="utf-8")
    print(f"wrote {PATH}: {len(faults)} faults")


if __name__ == "__main__":
    main()
