"""Read datasets in COCO, YOLO, Pascal VOC, LabelMe, CVAT and VIA format, and return them as COCO files."""

from projects_vil.data.readers.coco import as_box, read_coco
from projects_vil.data.readers.dataset import SOURCE, Dataset, read_dataset
