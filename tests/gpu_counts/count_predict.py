"""Count the synchronizations with the GPU in ``Detector.detect`` for one batch, and print JSON: {line: number}.

Arguments: retinanet or mask_rcnn, and the number of images in the batch.
"""

import contextlib
import json
import sys
import tempfile
from itertools import islice
from pathlib import Path

import mockcuda
import numpy as np

from projects_vil import Detector
from projects_vil.inference.image_loading import ImageBatches, ImageSource
from tests.projects_vil.inference.helpers import save_run

name, number = sys.argv[1], int(sys.argv[2])
with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
    save_run(Path(folder), name, "MODEL.TRANSFORMER.ATTENTION_BACKEND", "sdpa")
    images = ImageBatches([ImageSource(np.zeros((40, 60, 3), np.uint8), "a", 1)] * number * 2)
    batches = Detector.load(folder, device="cuda").detect(images, lambda *result: result, batch_size=number)
    # The first batch allocates permanent buffers.
    list(islice(batches, number))
    with mockcuda.Count() as count:
        list(islice(batches, number))
print(json.dumps(count.waits))
