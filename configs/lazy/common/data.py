"""Loaders and evaluator of COCO; a config sets the number of classes and whether there are masks."""

from detectron2.config import LazyCall as L
from detectron2.data import build_detection_test_loader
from detectron2.data import transforms as T

from projects_vil.data import Mapper, make_train_loader
from projects_vil.engine import load_records
from projects_vil.evaluation import COCOEvaluator

dataloader = dict(
    # Your own datasets, each as [name, annotation file, image folder].
    coco=[],
    train=L(make_train_loader)(
        dataset=L(load_records)(names=["coco_2017_train"], train=True, num_classes=80, masks=False),
        mapper=L(Mapper)(
            is_train=True,
            augmentations=[
                L(T.ResizeShortestEdge)(short_edge_length=[800], max_size=1333, sample_style="choice"),
                L(T.RandomFlip)(horizontal=True),
            ],
            image_format="${model.input_format}",
            use_instance_mask="${..dataset.masks}",
        ),
        total_batch_size=16,
        num_workers=4,
    ),
    test=L(build_detection_test_loader)(
        dataset=L(load_records)(
            names=["coco_2017_val"],
            train=False,
            num_classes="${...train.dataset.num_classes}",
            classes_of="${...train.dataset.names}",
        ),
        mapper=L(Mapper)(
            is_train=False,
            augmentations=[L(T.ResizeShortestEdge)(short_edge_length=[800, 800], max_size=1333)],
            image_format="${model.input_format}",
        ),
        num_workers=4,
    ),
    evaluator=L(COCOEvaluator)(
        dataset_name="${..test.dataset.names[0]}",
        output_dir="${train.output_dir}/inference",
        max_dets_per_image=100,
        masks="${..train.dataset.masks}",
    ),
)
