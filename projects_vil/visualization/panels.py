"""Sheets of titled panels."""

from collections.abc import Sequence

import cv2
import numpy as np

PANEL_WIDTH, PANEL_HEIGHT = 480, 560  # pixels; a drawn image fills one of them
HEADER = 28  # pixels of the title strip over a panel
GAP = 8  # pixels between panels
TITLE_FONT, TITLE_SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.45


def panel_below_title(drawn: np.ndarray, height: int, title: str) -> np.ndarray:
    """A drawing of that height centred below a title: (HEADER + height, PANEL_WIDTH, 3) uint8 RGB."""
    drawn = drawn[:PANEL_HEIGHT, :PANEL_WIDTH]
    panel = np.full((HEADER + height, PANEL_WIDTH, 3), 255, np.uint8)
    left = (PANEL_WIDTH - drawn.shape[1]) // 2
    panel[HEADER : HEADER + drawn.shape[0], left : left + drawn.shape[1]] = drawn
    return put_title(panel, title)


def put_title(panel: np.ndarray, title: str) -> np.ndarray:
    """Write into the panel's first HEADER rows, which are white."""
    return cv2.putText(panel, title, (4, HEADER - 9), TITLE_FONT, TITLE_SCALE, (0, 0, 0), 1, cv2.LINE_AA)


def stack_rows(rows: list[np.ndarray], *, title: str) -> np.ndarray:
    width = rows[0].shape[1]
    header = put_title(np.full((HEADER, width, 3), 255, np.uint8), title)
    return np.vstack([header, *rows])


def fit(image: np.ndarray, *, width: int = PANEL_WIDTH, height: int = PANEL_HEIGHT) -> tuple[np.ndarray, float]:
    """``image`` enlarged or reduced into a box, and its scale."""
    scale = min(width / image.shape[1], height / image.shape[0])
    size = max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale))
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC), scale


def sheet(title: str, rows: Sequence[Sequence[tuple[str, np.ndarray]]]) -> np.ndarray:
    """Rows of drawings, each below its title, below one title for all: (height, width, 3) uint8 RGB."""
    drawn = []
    for row in rows:
        panels = [_titled(text, drawing) for text, drawing in row]
        height = max(map(len, panels))
        drawn.append(np.hstack([_pad(panel, height + GAP, panel.shape[1] + GAP) for panel in panels]))
    width = max(row.shape[1] for row in drawn)
    header = _titled(title, np.empty((0, width, 3), np.uint8))
    return np.vstack([header, *(_pad(row, len(row), width) for row in drawn)])


def in_rows(panels: Sequence, columns: int) -> list[Sequence]:
    return [panels[start : start + columns] for start in range(0, len(panels), columns)]


def _titled(title: str, drawing: np.ndarray) -> np.ndarray:
    width = max(PANEL_WIDTH, drawing.shape[1])
    header = np.full((HEADER, width, 3), 255, np.uint8)
    return np.vstack([put_title(header, title), _pad(drawing, len(drawing), width)])


def _pad(image: np.ndarray, height: int, width: int) -> np.ndarray:
    padded = np.full((height, width, 3), 255, np.uint8)
    padded[: image.shape[0], : image.shape[1]] = image
    return padded
