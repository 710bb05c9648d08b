"""The public names of the package. Importing this module registers the builders in detectron2."""

from projects_vil.files import paused_garbage_collection

# The imports create so many objects that garbage collections would take more than a tenth of the time.
with paused_garbage_collection():
    from projects_vil.utils import silence_known_warnings

    # Before detectron2 is imported, which raises some.
    silence_known_warnings()

    from projects_vil.checkpoint import Checkpointer
    from projects_vil.config import add_vil_config, load_config
    from projects_vil.data import register_datasets
    from projects_vil.engine import Trainer
    from projects_vil.inference import Detector
    from projects_vil.run import Run, evaluate, train
    from projects_vil.solver import build_optimizer
