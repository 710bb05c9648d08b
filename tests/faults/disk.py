"""Disks that are full, and files where folders should be."""

from tests.faults.fault import OUTPUT, TRAIN, Fault
from tests.faults.spoiling import made_a_folder, written

_RUN = "--config-file run/config.yaml --weights run/model_final.pth"
_FULL = 200_000

FAULTS = (
    Fault("a full disk while a checkpoint is written", TRAIN, makes=OUTPUT, file_size=_FULL),
    *(
        Fault(
            f"a full disk while {name} is written",
            f"export_model.py {_RUN} --output out --format {name}",
            parts=("run",),
            makes=("out",),
            file_size=_FULL,
        )
        for name in ("torchscript", "torch_export", "onnx")
    ),
    Fault(
        "a full disk while predictions are written",
        f"predict.py {_RUN} --input photos --output out",
        parts=("run",),
        makes=("out", "out/*"),
        file_size=500,
    ),
    Fault(
        "a full disk while results alone are written",
        f"predict.py {_RUN} --input photos --output out --no-drawings",
        parts=("run",),
        makes=("out",),
        file_size=2000,
    ),
    Fault("a subset below a file", "make_coco_subset.py own/annotations.json small.yaml/out.json --num-images 2"),
    Fault(
        "a full disk while a cleaned copy is written",
        "check_dataset.py own/annotations.json own/images --fix clean.json",
        file_size=500,
    ),
    Fault(
        "a full disk while weights are slimmed",
        "slim_checkpoint.py run/model_final.pth slim.pth",
        parts=("run",),
        file_size=_FULL,
    ),
    Fault("a full disk while a report is written", "report.py run", parts=("run",), file_size=_FULL),
    Fault(
        "a full disk while shapes are drawn", "make_shapes_dataset.py drawn --num-train 40 --num-val 4", file_size=5_000
    ),
    Fault("OUTPUT_DIR below a file", f"{TRAIN} OUTPUT_DIR small.yaml/run"),
    Fault("an export into a file", f"export_model.py {_RUN} --output small.yaml", parts=("run",)),
    Fault(
        "an export over a folder", f"export_model.py {_RUN} --output out", made_a_folder("out/model.ts"), parts=("run",)
    ),
    Fault("predictions into a file", f"predict.py {_RUN} --input photos --output small.yaml", parts=("run",)),
    Fault("a report into no folder", "report.py run --output absent/report.html", parts=("run",)),
    Fault("a report over a folder", "report.py run --output own", parts=("run",)),
    Fault(
        "drawings into a file",
        "visualize_attention.py --config-file small.yaml --input photos/a.jpg --output small.yaml "
        "--stage 1 --block 1 --point 5 5",
    ),
    Fault("shapes over other files", "make_shapes_dataset.py own", written("own/mine.txt", "mine")),
    Fault("weights converted into no folder", "slim_checkpoint.py run/model_final.pth absent/slim.pth", parts=("run",)),
)
