"""Track objects through the frames of a video or a folder, with ByteTrack."""

import dataclasses

import numpy as np
import supervision
from trackers import ByteTrackTracker

from backbones import ConfigError
from projects_vil.inference.detector import Detections
from projects_vil.inference.image_loading import Loaded


class Tracker:
    """Give the detections of consecutive frames the ids of their tracks.

    A track has an id from its second frame on. A detection with a low score continues a track, but does not start one.

    Args:
        frame_rate: Frames per second. A track ends after one second without a detection.
        threshold: Lowest score of a detection that starts a track, in [0, 1].
    """

    def __init__(self, *, frame_rate: float, threshold: float) -> None:
        scores = dict.fromkeys(("track_activation_threshold", "high_conf_det_threshold"), threshold)
        self._tracker = ByteTrackTracker(frame_rate=frame_rate, **scores)
        self._last_index = -1

    def update(self, frame: Loaded, detections: Detections) -> Detections:
        """Return the detections of the next frame with ``track_ids``.

        Raises:
            ConfigError: If a frame before the last one is given, because images of other sizes are in other batches.
        """
        if frame.index < self._last_index:
            raise ConfigError(f"--track needs frames of one size. '{frame.source.name}' has another size. Resize it.")
        self._last_index = frame.index
        numbers, track_ids = np.arange(len(detections)), np.full(len(detections), -1)
        tracked = self._tracker.update(
            supervision.Detections(detections.boxes, confidence=detections.scores, data={"number": numbers})
        )
        if len(tracked):
            track_ids[tracked.data["number"]] = tracked.tracker_id
        return dataclasses.replace(detections, track_ids=track_ids)
