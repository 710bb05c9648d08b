"""Text that a model goes on with, byte after byte."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    number: int,
    length: int,
    other: int,
    seed: int = 0,
    temperature: float = 1.0,
    device: torch.device | str = "cpu",
) -> list[int]:
    """Ids that follow a prompt, drawn by the model's probabilities.

    The text is cut into parts as in training: the memory is of whole parts, and a part that is not full yet is computed
    anew for each byte.

    Args:
        model: as :func:`create_model` makes it.
        prompt: (P,) ids, one or more.
        number: of ids to draw.
        length: bytes of a part.
        other: the id that stands for unknown bytes, which is never drawn.
        seed: the same one gives the same ids on the same machine.
        temperature: divides the log-probabilities: above 0; less is surer.
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids, first, memory = prompt.tolist(), 0, None
    while True:
        # At least one byte of the prompt, or of what was drawn, is left to predict from.
        while len(ids) - first > length:
            _, memory = model(torch.tensor([ids[first : first + length]], device=device), memory)
            first += length
        if len(ids) == len(prompt) + number:
            break
        log_probabilities, _ = model(torch.tensor([ids[first:]], device=device), memory)
        scores = log_probabilities[0, -1].double().cpu()
        scores[other] = -torch.inf
        # Less the highest, so that a temperature near 0 makes it sure and not infinite.
        scores = (scores - scores.max()) / temperature
        ids.append(int(torch.multinomial(scores.softmax(dim=0), 1, generator=generator)))
    model.train(was_training)
    return ids[len(prompt) :]
