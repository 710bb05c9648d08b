"""Track objects in a video or a folder of frames with supervision and ByteTrack, and draw the tracks.

Example:
    python examples/track_supervision.py output/vil_tiny street.mp4 tracked.mp4 --threshold 0.5
"""

import argparse
from pathlib import Path

import cv2

from backbones import ConfigError
from projects_vil import Detector

try:
    import supervision as sv
    from trackers import ByteTrackTracker
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: docs/hub.md (Other libraries) explains the installation") from error

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("detector", "source", "output"):
    parser.add_argument(name)
parser.add_argument("--threshold", type=float, default=0.5, help="lowest score that starts a track (default 0.5)")
parser.add_argument("--fps", type=int, default=10, help="frames per second of a folder (default 10)")
args = parser.parse_args()
source = Path(args.source)
try:
    if not (0 <= args.threshold <= 1 and args.fps >= 1 and args.output.endswith(".mp4")):
        given = f"got {args.threshold}, {args.fps} and {args.output!r}"
        raise ConfigError(f"--threshold must be in [0, 1], --fps at least 1, and the output must end in .mp4; {given}.")
    detector = Detector.load(args.detector)
    if source.is_dir():
        files = [str(path) for path in sorted(source.iterdir()) if cv2.haveImageReader(str(path))]
        first = cv2.imread(files[0]) if files else None
        if first is None:
            raise ConfigError(f"Folder '{source}' has no images, or the first one is damaged.")
        info, frames = sv.VideoInfo(width=first.shape[1], height=first.shape[0], fps=args.fps), map(cv2.imread, files)
    elif not cv2.VideoCapture(args.source).isOpened() or source.resolve() == Path(args.output).resolve():
        raise ConfigError(f"Cannot read video '{source}', or it is the output too.")
    else:
        info, frames = sv.VideoInfo.from_video_path(args.source), sv.get_video_frames_generator(args.source)
    scores = {"track_activation_threshold": args.threshold, "high_conf_det_threshold": args.threshold}
    tracker, seen = ByteTrackTracker(frame_rate=info.fps, **scores), set()
    annotators = (sv.BoxAnnotator, sv.TraceAnnotator, sv.LabelAnnotator)
    draw_box, draw_trace, draw_label = (annotator(color_lookup=sv.ColorLookup.TRACK) for annotator in annotators)
    with sv.VideoSink(args.output, info) as sink:
        for index, frame in enumerate(frames):  # (height, width, BGR)
            if frame is None or frame.shape[:2] != (info.height, info.width):
                raise ConfigError(f"'{source}': frame {index + 1} is damaged or differs in size from the first one.")
            tracked = tracker.update(sv.Detections.from_detectron2(detector(frame[..., ::-1]).as_detectron2()))
            tracked = tracked[tracked.tracker_id >= 0]
            seen.update(tracked.tracker_id.tolist())
            pairs = zip(tracked.tracker_id, tracked.class_id, strict=True)
            labels = [f"{track} {detector.names[index]}" for track, index in pairs]
            drawn = draw_trace.annotate(draw_box.annotate(frame, tracked), tracked)
            sink.write_frame(draw_label.annotate(drawn, tracked, labels))
    print(f"{len(seen)} tracks in {args.output}")
except (ConfigError, OSError, RuntimeError) as error:
    raise SystemExit(f"error: {error}") from error
