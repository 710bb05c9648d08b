"""Search for the best recipe for a dataset with Optuna. Each trial is a short run of ``vil train``."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import optuna
import yaml
from detectron2.config import CfgNode
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import Trial, TrialState

from backbones import ConfigError
from backbones.errors import GENERATOR
from backbones.files import write_text
from projects_vil.checkpoint import checkpoints_of
from projects_vil.config import CONFIG_FILE, load_config
from projects_vil.recipes import size_values

# Config key -> factors of its value in the recipe. The factor of INPUT.MIN_SIZE_TRAIN is for the range of its sizes.
SPACE: dict[str, BaseDistribution] = {
    "SOLVER.BASE_LR": FloatDistribution(0.2, 5.0, log=True),
    "SOLVER.WEIGHT_DECAY": FloatDistribution(0.1, 5.0, log=True),
    "SOLVER.IMS_PER_BATCH": CategoricalDistribution([0.5, 1.0, 2.0]),
    "INPUT.MIN_SIZE_TEST": CategoricalDistribution([0.75, 1.0, 1.25, 1.5]),
    "INPUT.MIN_SIZE_TRAIN": CategoricalDistribution([0.0, 1.0, 2.0]),
    "INPUT.PHOTOMETRIC_DISTORTION": CategoricalDistribution([0.0, 1.0]),
}
# The sizes of the training images differ from the image size by up to this share, times the factor.
_JITTER = 0.2
_SECONDS_BETWEEN_READS = 2.0
# Config keys of a trial that best.yaml does not have. SOLVER.EPOCHS replaces the others that depend on the length.
_OF_A_RUN = ("DATASETS", "OUTPUT_DIR", "SEED", "SOLVER.WARMUP_ITERS")


def tune(data: str, output: Path, *, trials: int, metric: str, words: Sequence[str], given: Mapping[str, str]) -> None:
    """Search for config values with a high AP on the validation images, and write the best config to ``best.yaml``.

    The first trial is the recipe of ``vil train``. Optuna's TPE sampler chooses the values of the others. Successive
    halving (ASHA) stops a trial whose AP is not among the best third after the same number of evaluations. The study is
    in ``study.db``. If the search is interrupted, the same command resumes it.

    Args:
        data: The dataset, as for ``vil train``.
        output: The output directory. Trial N has the subfolder ``trial_N``.
        trials: Number of trials, including interrupted and failed ones.
        metric: Name of the metric in ``metrics.json``, such as ``"bbox/AP"``.
        words: Further arguments of ``vil train``.
        given: Config keys and values for all trials. They are not searched.

    Raises:
        ConfigError: If the first trial fails, or if ``output`` has a search with other arguments.
    """
    if (output / CONFIG_FILE).exists():
        raise ConfigError(f"'{output}' is the output directory of a run. Choose another output directory.")
    output.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = {"direction": "maximize", "load_if_exists": True}
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    storage = f"sqlite:///{output.resolve()}/study.db"
    study = optuna.create_study(storage=storage, study_name="vil", pruner=pruner, **options)
    # With the same seed, a resumed search would repeat the first trials.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    arguments = [data, *words, *(word for pair in given.items() for word in pair)]
    if study.user_attrs.get("arguments", arguments) != arguments:
        raise ConfigError(f"'{output}' has a search with other arguments. Choose another output directory.")
    study.set_user_attr("arguments", arguments)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    space = {key: SPACE[key] for key in SPACE if key not in given}
    recipe = study.user_attrs.get("recipe")
    if recipe is None:
        study.enqueue_trial(dict.fromkeys(space, 1.0))
    print(f"Trial N writes to '{output}/trial_N' and '{output}/trial_N.txt'", flush=True)
    while len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))) < trials:
        trial = study.ask(space)
        folder = output / f"trial_{trial.number}"
        overrides = _overrides(load_config(recipe), trial.params) if recipe else {}
        pairs = [word for key, value in overrides.items() if key not in given for word in (key, str(value))]
        try:
            value = _run(trial, [*arguments, "--output", str(folder), *pairs], folder, metric)
            state = TrialState.PRUNED if value is None else TrialState.COMPLETE
            result = "stopped early" if value is None else f"{metric} {value:.1f}"
        except ConfigError as error:
            value, state, result = None, TrialState.FAIL, str(error)
        study.tell(trial, value, state=state)
        if recipe is None:
            if value is None:
                raise ConfigError(result)
            recipe = str(folder.resolve() / CONFIG_FILE)
            study.set_user_attr("recipe", recipe)
        for path in checkpoints_of(folder):
            path.unlink()
        print(f"trial {trial.number}: {result} with {' '.join(pairs) or 'the recipe'}", flush=True)
        if value is not None and study.best_trial.number == trial.number:
            _write_best(folder / CONFIG_FILE, output / "best.yaml", f"trial {trial.number} of vil tune: {result}")


def _overrides(recipe: CfgNode, given: Mapping[str, float]) -> dict[str, object]:
    """Return the config keys of a trial, from the config of the first trial and the factors of its values."""
    factors = dict.fromkeys(SPACE, 1.0) | given
    size = max(round(recipe.INPUT.MIN_SIZE_TEST * factors["INPUT.MIN_SIZE_TEST"] / 32) * 32, 64)
    jitter = _JITTER * factors["INPUT.MIN_SIZE_TRAIN"]
    sizes = sorted({round(size * (1 + jitter * step / 2)) for step in range(-2, 3)})
    return size_values(size) | {
        "SOLVER.BASE_LR": recipe.SOLVER.BASE_LR * factors["SOLVER.BASE_LR"],
        "SOLVER.WEIGHT_DECAY": recipe.SOLVER.WEIGHT_DECAY * factors["SOLVER.WEIGHT_DECAY"],
        "SOLVER.IMS_PER_BATCH": max(round(recipe.SOLVER.IMS_PER_BATCH * factors["SOLVER.IMS_PER_BATCH"]), 1),
        "SOLVER.GRADIENT_ACCUMULATION_STEPS": "auto",
        "INPUT.MIN_SIZE_TRAIN": tuple(sizes),
        "INPUT.MAX_SIZE_TRAIN": size_values(sizes[-1])["INPUT.MAX_SIZE_TRAIN"],
        "INPUT.PHOTOMETRIC_DISTORTION": bool(factors["INPUT.PHOTOMETRIC_DISTORTION"]),
    }


def _run(trial: Trial, arguments: Sequence[str], folder: Path, metric: str) -> float | None:
    """Train in another process, and return the best value of the metric, or None if the pruner stops the trial.

    Raises:
        ConfigError: If the training fails. The message has its last line.
    """
    log, values, reported, is_running = folder.with_suffix(".txt"), [], 0, True
    with log.open("w") as file:
        command = [sys.executable, "-m", "vil", "train", *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        while is_running:
            time.sleep(_SECONDS_BETWEEN_READS)
            is_running = process.poll() is None
            values = _read_metric(folder / "metrics.json", metric)
            for step, value in enumerate(values[reported:], reported + 1):
                trial.report(value, step)
            reported = len(values)
            if is_running and trial.should_prune():
                return None
    finally:
        process.terminate()
        process.wait()
    if process.returncode or not values:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2].removeprefix("error: ")
        raise ConfigError(f"Trial {trial.number} failed: {last} Its output is in '{log}'.")
    return max(values)


def _read_metric(path: Path, metric: str) -> list[float]:
    """Return the values of a metric in ``metrics.json``. An undefined AP counts as 0."""
    # The last line may be incomplete.
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    values = [json.loads(line)[metric] for line in lines if f'"{metric}"' in line]
    return [0.0 if math.isnan(value) else value for value in values]


def _write_best(config: Path, path: Path, title: str) -> None:
    """Write the config of a trial for ``vil train --config``."""
    content = yaml.safe_load(config.read_text())
    for key in _OF_A_RUN:
        section, _, name = key.rpartition(".")
        (content[section] if section else content).pop(name, None)
    write_text(path, f"# {GENERATOR}, {title}\n{yaml.safe_dump(content)}")
