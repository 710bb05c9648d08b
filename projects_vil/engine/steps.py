"""One step of training: the parts of a batch, mixed precision, and what is done where a loss is not finite."""

import contextlib
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils import comm
from torch import Tensor, nn

from backbones import InputError
from backbones.utils.files import written_whole
from projects_vil.config import one_line
from projects_vil.modeling import BatchParts
from projects_vil.solver import shown_group

AMP_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DIVERGED_FILE = "diverged.json"
# Steps in a row that a scaler of float16 may leave out: from any scale that it grows to, it is below 1 by then.
MOST_OVERFLOWS = 32


class Steps(SimpleTrainer):
    """detectron2's step, of a batch in parts, in a mixed precision or not, that leaves no weight that is not finite.

    Where a loss or the norm of the gradients is not finite, all processes leave the batch out, or stop: the weights,
    the optimizer and the statistics of BatchNorm stay as they were before the step. Images, losses and learning rate go
    to ``diverged.json``. Gradients that overflow under the scaler of float16 are no such case: it lowers its scale.

    Args:
        model, data_loader, optimizer: as detectron2's.
        output_dir: where ``diverged.json`` goes.
        accumulate: into how many parts a batch is split; the gradients are those of the whole batch, as far as
            :class:`~projects_vil.modeling.BatchParts` can have them.
        precision: what autocast computes in, None for none; float16 scales the loss.
        skip: how many batches may be left out before the run stops.

    Attributes:
        has_stepped: whether the last step changed the weights.
        skipped: batches that were left out.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Any,
        optimizer: torch.optim.Optimizer,
        *,
        output_dir: str | Path,
        accumulate: int = 1,
        precision: torch.dtype | None = None,
        skip: int = 0,
    ) -> None:
        super().__init__(model, data_loader, optimizer)
        self.output_dir = Path(output_dir)
        self.accumulate = accumulate
        self.precision = precision
        self.skip = skip
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type) if precision == torch.float16 else None
        self.has_stepped = False
        self.skipped = 0
        self.overflows = 0

    def run_step(self) -> None:
        """One step.

        Raises:
            InputError: in all processes, where it diverged and no more batch may be left out.
        """
        start = time.perf_counter()
        images = next(self._data_loader_iter)
        data_time = time.perf_counter() - start
        parts, statistics = BatchParts(unwrapped(self.model)), self._copy_statistics()
        self.optimizer.zero_grad()
        self.has_stepped = False
        losses, seen, reason = self._backward(images, parts)
        reason = reason or self._update()
        if reason:
            self.optimizer.zero_grad()
            parts.restore()
            for buffer, before in statistics:
                buffer.copy_(before)
            self._leave_out(reason, losses, seen)
        else:
            terms = {name: torch.tensor(value, dtype=torch.float64) for name, value in losses.items()}
            self.write_metrics(terms, data_time, self.iter)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {"skipped": self.skipped, "overflows": self.overflows}
        return state if self.scaler is None else state | {"grad_scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of a checkpoint.

        Raises:
            InputError: where it is of another optimizer, or of one with other groups of parameters.
        """
        check_groups(state_dict["optimizer"]["param_groups"], self.optimizer.param_groups)
        super().load_state_dict(state_dict)
        # Older checkpoints have neither.
        self.skipped, self.overflows = state_dict.get("skipped", 0), state_dict.get("overflows", 0)
        if self.scaler is not None and "grad_scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["grad_scaler"])

    def forget_after(self, iteration: int) -> None:
        """Take an iteration and later ones out of ``diverged.json``: a run begins with it, anew or once more."""
        if comm.is_main_process():
            _rewrite(self.output_dir / DIVERGED_FILE, before=iteration)

    def _backward(
        self, images: list[dict[str, Any]], parts: BatchParts
    ) -> tuple[dict[str, float], list[dict[str, Any]], str]:
        """Gradients of all parts.

        Returns:
            The losses of the batch, its images, and nothing; or those of the part that diverged, in this process or
            another, and why.
        """
        size = len(images) // self.accumulate
        weighted: dict[str, float] = defaultdict(float)
        divisor = 1.0
        for index in range(self.accumulate):
            part, is_last = images[index * size : (index + 1) * size], index == self.accumulate - 1
            with self._without_sharing() if not is_last else contextlib.nullcontext():
                parts.restore()
                total, losses, failure = self._forward(part)
                # Each part anew: nobody may wait in a backward pass for one that has none.
                failure = next(filter(None, comm.all_gather(failure)), "")
                if failure:
                    return losses, part, failure
                weight = parts.weight(len(part))
                if index == 0:
                    # What it will be is known after the last part; until then, near it.
                    divisor = weight * self.accumulate
                if is_last and divisor != (right := parts.divisor()):
                    torch._foreach_mul_(self._gradients(), divisor / right)
                    divisor = right
                for name, value in losses.items():
                    weighted[name] += value * weight
                total = total * (weight / divisor)
                (total if self.scaler is None else self.scaler.scale(total)).backward()
        self.after_backward()
        return {name: value / divisor for name, value in weighted.items()}, images, ""

    def _forward(self, part: list[dict[str, Any]]) -> tuple[Tensor, dict[str, float], str]:
        """The loss, its terms, and what is not finite among them, in words."""
        try:
            with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
                terms = self.model(part)
        except FloatingPointError as error:  # detectron2's, of proposals.
            return torch.tensor(math.nan), {}, one_line(error).removesuffix(" Training has diverged.")
        values = torch.stack([value.detach().double() for value in terms.values()]).tolist()
        losses = dict(zip(terms, values, strict=True))
        failure = ", ".join(f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value))
        return sum(terms.values()), losses, failure

    def _update(self) -> str:
        """The optimizer's step, where the gradients are finite; else why the run has diverged, if it has."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = float(nn.utils.get_total_norm(self._gradients()))
        if math.isfinite(norm):
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.has_stepped, self.overflows = True, 0
            return ""
        if self.scaler is None:
            return f"the norm of the gradients is {norm}"
        self.scaler.update()
        self.overflows += 1
        if self.overflows < MOST_OVERFLOWS:
            return ""
        scale = self.scaler.get_scale()
        return f"the norm of the gradients was {norm} in {self.overflows} steps in a row, the loss scaled by {scale:g}"

    def _leave_out(self, reason: str, losses: dict[str, float], images: Sequence[dict[str, Any]]) -> None:
        """Write what diverged, in all processes, and go on or stop."""
        self.skipped += 1
        is_last = self.skipped > self.skip
        rate = self.optimizer.param_groups[shown_group(self.optimizer)]["lr"]
        own = {
            "losses": {name: value if math.isfinite(value) else str(value) for name, value in losses.items()},
            "images": [{key: image.get(key) for key in ("image_id", "file_name")} for image in images],
        }
        processes = comm.gather(own)
        path = self.output_dir / DIVERGED_FILE
        if comm.is_main_process():
            entry = {"iteration": self.iter, "reason": reason, "learning_rate": rate, "is_skipped": not is_last}
            _rewrite(path, before=self.iter, new=[entry | {"processes": processes}])
        # Whoever raises first ends the others.
        comm.synchronize()
        said = f"diverged in iteration {self.iter}: {reason} (learning rate {rate:g}; images and losses are in {path})"
        if not is_last:
            logging.getLogger(__name__).warning(
                "%s; the batch is left out, %d of SOLVER.SKIP_DIVERGED %d", said, self.skipped, self.skip
            )
            return
        raise InputError(
            f"{said}; no weight has changed by it: --resume from the last checkpoint, or begin anew, with a lower "
            f"SOLVER.BASE_LR, or leave such batches out by SOLVER.SKIP_DIVERGED {max(2 * self.skip, 10)}"
        )

    def _gradients(self) -> list[Tensor]:
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _without_sharing(self) -> contextlib.AbstractContextManager:
        """While gradients stay in this process; they are shared with those of the last part."""
        is_distributed = isinstance(self.model, nn.parallel.DistributedDataParallel)
        return self.model.no_sync() if is_distributed else contextlib.nullcontext()

    def _copy_statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers that a forward pass changes, and their values."""
        norms = (module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
        return [(buffer, buffer.clone()) for norm in norms if norm.training for buffer in norm.buffers(recurse=False)]


def check_groups(saved: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]) -> None:
    """Whether the groups of parameters of a checkpoint's optimizer are those of the run that resumes it.

    Raises:
        InputError: where they are not.
    """
    if [_shape(group) for group in saved] != [_shape(group) for group in own]:
        raise InputError(
            "the resumed run has another optimizer, other multipliers or other frozen stages: take SOLVER and "
            "MODEL.BACKBONE.FREEZE_AT of its config.yaml, or begin anew from its weights (MODEL.WEIGHTS, without "
            "--resume, in another OUTPUT_DIR)"
        )


def _shape(group: dict[str, Any]) -> tuple[int, bool]:
    """How many parameters a group has, and whether it is of an optimizer like Adam; versions of torch name more."""
    return len(group["params"]), "betas" in group


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself where DistributedDataParallel is around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _rewrite(path: Path, *, before: int, new: Sequence[dict[str, Any]] = ()) -> None:
    """Keep what a JSON list has of earlier iterations, and add to it; no file where nothing is left."""
    old = json.loads(path.read_text()) if path.exists() else []
    entries = [*(entry for entry in old if entry["iteration"] < before), *new]
    if not entries:
        path.unlink(missing_ok=True)
    elif entries != old:
        with written_whole(path) as partial:
            partial.write_text(json.dumps(entries, indent=2) + "\n")
