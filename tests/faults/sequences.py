"""The experiments on sequences: texts, tasks and settings."""

from tests.faults.fault import Fault
from tests.faults.spoiling import emptied, made_a_folder, written

_LM = "train_char_lm.py --data text --output out --layers 1 --dim 16 --heads 2 --window 16 --length 16 --steps 3"
_TEXT = written("text", "a line of words\n" * 200)
_LISTOPS = "train_lra.py --task listops --data lra --min-length 10 --max-length 40 --steps 20 --warmup 2"


def _of_text(name: str, options: str) -> Fault:
    return Fault(name, f"{_LM} {options}", _TEXT)


FAULTS = (
    Fault("a text that is missing", _LM),
    Fault("a text of no bytes", _LM, emptied("text")),
    Fault("a text of a few bytes", _LM, written("text", "too short")),
    Fault("a text that is a folder", _LM, made_a_folder("text")),
    Fault("a text that is too short for its parts", f"{_LM} --batch-size 200", _TEXT),
    _of_text("heads that do not divide the channels", "--heads 3"),
    _of_text("more lengths than phases", "--length 16 16"),
    _of_text("a rate that is no number", "--rate nan"),
    _of_text("a warm-up that outlasts the phase", "--warm-up 3"),
    _of_text("a prompt of no text", "--sample 5 --prompt ''"),
    _of_text("a prompt without a sample", "--prompt a"),
    _of_text("an unknown byte in the prompt", "--sample 5 --prompt Z"),
    _of_text("a memory that is no multiple of the segment", "--memory 20"),
    _of_text("nothing to resume for a character model", "--resume"),
    _of_text("a character model's output that is a file", "--output small.yaml"),
    Fault("character model's weights that are text", "train_char_lm.py --generate --weights small.yaml"),
    Fault("a sample without weights", "train_char_lm.py --generate"),
    Fault("lengths for a training", "train_char_lm.py --data text --output out --lengths 512", _TEXT),
    Fault("a task that is none", "train_lra.py --task pathfinder", status=2),
    Fault("reviews that are missing", "train_lra.py --task text --data own --output out"),
    Fault("papers that are missing", "train_lra.py --task retrieval --data own --output out"),
    Fault(
        "a line that is no pair of papers",
        "train_lra.py --task retrieval --data .",
        written("new_aan_pairs.train.tsv", "0\t1\n"),
    ),
    Fault("released ListOps that is missing", "train_lra.py --task listops --released --data own"),
    Fault("lengths that no sample has", f"{_LISTOPS} --max-length 11"),
    Fault("more samples than there are", f"{_LISTOPS} --min-length 1 --max-length 5 --num-train 100000"),
    Fault("a warm-up of one step", f"{_LISTOPS} --warmup 1"),
    Fault("a window for an ablation of it", f"{_LISTOPS} --ablate window --window-size 8"),
    Fault("a model that sees nothing", f"{_LISTOPS} --config projection --ablate projection"),
    Fault("samples for a task that has its own", "train_lra.py --task text --num-train 10"),
    Fault("a course for a measurement", "train_lra.py --task listops --measure --steps 10"),
)
