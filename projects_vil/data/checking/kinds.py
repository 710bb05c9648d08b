"""What can be wrong with a COCO file: each kind once, with its words."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "mended", "note"]
# From the worst on.
LEVELS: tuple[Level, ...] = ("error", "mended", "note")


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: in JSON.
        level: ``"error"`` stops a run, ``"mended"`` is read as it can only be meant, ``"note"`` does no harm.
        what: in the plural, after a number.
        one: in the singular.
        training: what a run does with it; of an error, with ``DATASETS.CHECK warn``.
        copy: what a cleaned copy has instead.
    """

    name: str
    level: Level
    what: str
    one: str
    training: str
    copy: str

    def counted(self, number: int) -> str:
        """``"2 boxes that are not finite"``."""
        return f"{number:,} {self.one if number == 1 else self.what}"


_OBJECT_LEFT_OUT = "the object is left out"
_OBJECTS_LEFT_OUT = "left out"
_IMAGE_LEFT_OUT = "the image and its objects are left out"
_BOX_OF_MASK = "the box of the mask where there is one, else left out"
_NO_MASK = "left out where no other polygon stays"
_AS_IT_IS = "as it is"
_RENUMBERED = "all images get new ids, by their place in the file"
_STOPS = "stops, always"

_KINDS = (
    # -- categories ------------------------------------------------------------------------------------
    Kind("category_form", "error", "categories that are no objects with an id and a name",
         "category that is no object with an id and a name", "left out, with its objects", "left out"),
    Kind("category_id_twice", "error", "categories whose id is taken", "category whose id is taken",
         "the first category with the id stays", "the first category with the id stays"),
    Kind("category_text", "mended", "categories whose id is written as text or with a decimal point",
         "category whose id is written as text or with a decimal point", "read as the whole number",
         "the whole number"),
    Kind("category_name_twice", "note", "categories whose name is taken", "category whose name is taken",
         "they are classes of their own", _AS_IT_IS),
    Kind("category_empty", "note", "categories without an object", "category without an object",
         "a class that is not learned", _AS_IT_IS),
    # -- images ----------------------------------------------------------------------------------------
    Kind("image_form", "error", "images that are no objects with an id and a file_name",
         "image that is no object with an id and a file_name", _IMAGE_LEFT_OUT, "left out, with its objects"),
    Kind("image_id_twice", "error", "images whose id is not unique", "image whose id is not unique",
         "of equal entries one stays; else all are left out, with their objects, for it cannot be told whose those are",
         "the same"),
    Kind("image_ids_mixed", "error", "images whose id is text, where other ids are numbers",
         "image whose id is text, where other ids are numbers", _RENUMBERED, _RENUMBERED),
    Kind("image_size_missing", "mended", "images without height and width", "image without height and width",
         "read from the file", "those of the file"),
    Kind("file_missing", "error", "images whose file is missing", "image whose file is missing",
         _IMAGE_LEFT_OUT, "left out, with its objects"),
    Kind("file_unreadable", "error", "image files that cannot be read", "image file that cannot be read",
         _IMAGE_LEFT_OUT, "left out, with its objects"),
    Kind("file_size", "error", "images of another size than their file", "image of another size than its file",
         _IMAGE_LEFT_OUT, "left out, with its objects"),
    Kind("file_twice", "note", "images whose file another one has too", "image whose file another one has too",
         "trained on as two images", _AS_IT_IS),
    Kind("image_empty", "note", "images without an object", "image without an object",
         "left out unless DATALOADER.FILTER_EMPTY_ANNOTATIONS is False; evaluated", _AS_IT_IS),
    # -- objects ---------------------------------------------------------------------------------------
    Kind("annotation_form", "error", "annotations that are no objects", "annotation that is no object",
         _OBJECTS_LEFT_OUT, "left out"),
    Kind("annotation_id_twice", "error", "annotations whose id is not unique", "annotation whose id is not unique",
         "an equal one is left out, another gets a new id", "the same"),
    Kind("annotation_id_unusable", "mended",
         "annotations without an id that is a whole number above 0, as COCO's evaluation needs it",
         "annotation without an id that is a whole number above 0, as COCO's evaluation needs it",
         "a new id", "a new id"),
    Kind("image_unknown", "error", "annotations of an image_id that no image has",
         "annotation of an image_id that no image has", _OBJECTS_LEFT_OUT, "left out"),
    Kind("image_id_text", "mended", "annotations whose image_id is written in another way than the image's id",
         "annotation whose image_id is written in another way than the image's id", "read as the image's id",
         "the image's id"),
    Kind("category_unknown", "error", "annotations of a category_id that no category has",
         "annotation of a category_id that no category has", _OBJECTS_LEFT_OUT, "left out"),
    Kind("category_id_text", "mended", "annotations whose category_id is written as text or with a decimal point",
         "annotation whose category_id is written as text or with a decimal point", "read as the whole number",
         "the whole number"),
    Kind("iscrowd_missing", "mended", "annotations without iscrowd", "annotation without iscrowd", "0", "0"),
    Kind("iscrowd_value", "error", "annotations whose iscrowd is neither 0 nor 1",
         "annotation whose iscrowd is neither 0 nor 1", _OBJECTS_LEFT_OUT, "left out"),
    Kind("ignored", "error", "annotations with ignore, which detectron2 does not know",
         "annotation with ignore, which detectron2 does not know", "taken for a crowd: not trained on, not counted",
         "a crowd (iscrowd 1)"),
    Kind("area_missing", "mended", "annotations without an area that can be", "annotation without an area that can be",
         "that of the mask, or of the box", "the same"),
    # -- boxes -----------------------------------------------------------------------------------------
    Kind("boxes_as_corners", "error", "files whose boxes fit their images as [left, top, right, bottom] only",
         "file whose boxes fit their images as [left, top, right, bottom] only", _STOPS,
         "cannot be mended: convert them to [left, top, width, height]"),
    Kind("boxes_as_fractions", "error", "files whose boxes are fractions of the image, not pixels",
         "file whose boxes are fractions of the image, not pixels", _STOPS,
         "cannot be mended: multiply them by width and height"),
    Kind("box_missing", "error",
         "annotations without a bbox", "annotation without a bbox", _OBJECTS_LEFT_OUT, "left out"),
    Kind("box_of_mask", "mended", "annotations without a bbox, with a mask", "annotation without a bbox, with a mask",
         "the box of the mask", "the box of the mask"),
    Kind("box_form", "error", "annotations whose bbox is not [left, top, width, height]",
         "annotation whose bbox is not [left, top, width, height]", _BOX_OF_MASK, "the same"),
    Kind("box_not_finite", "error", "boxes that are not finite", "box that is not finite", _BOX_OF_MASK, "the same"),
    Kind("box_negative", "error", "boxes of negative width or height", "box of negative width or height",
         _BOX_OF_MASK, "the same"),
    Kind("box_far", "error", "boxes that reach more than ten image sides beyond the image",
         "box that reaches more than ten image sides beyond the image", _BOX_OF_MASK, "the same"),
    Kind("box_outside", "error", "boxes that lie outside of the image", "box that lies outside of the image",
         _BOX_OF_MASK, "the same"),
    Kind("box_empty", "note", "boxes without area", "box without area",
         "not trained on; in evaluation objects that nothing finds", _AS_IT_IS),
    Kind("box_beyond", "note", "boxes that reach more than a pixel beyond the image",
         "box that reaches more than a pixel beyond the image", "cut off at the image's edge; evaluated as they are",
         _AS_IT_IS),
    # -- masks -----------------------------------------------------------------------------------------
    Kind("mask_missing", "error", "annotations without the segmentation that others have",
         "annotation without the segmentation that others have", _OBJECTS_LEFT_OUT, "left out"),
    Kind("mask_form", "error", "segmentations that are neither polygons nor RLE",
         "segmentation that is neither polygons nor RLE", _NO_MASK, "the same"),
    Kind("mask_points", "error", "masks without a polygon of three points", "mask without a polygon of three points",
         _OBJECTS_LEFT_OUT, "left out"),
    Kind("mask_outside", "error", "masks that lie outside of the image", "mask that lies outside of the image",
         _OBJECTS_LEFT_OUT, "left out"),
    Kind("polygon_not_finite", "error", "masks with a polygon that is not finite",
         "mask with a polygon that is not finite", _NO_MASK, "the same"),
    Kind("polygon_far", "error", "masks with a polygon more than ten image sides beyond the image",
         "mask with a polygon more than ten image sides beyond the image", _NO_MASK, "the same"),
    Kind("polygon_points", "mended", "masks with a polygon of fewer than three points among others",
         "mask with a polygon of fewer than three points among others", "the others stay", "the others"),
    Kind("polygon_outside", "mended", "masks with a polygon outside of the image among others",
         "mask with a polygon outside of the image among others", "the others stay", "the others"),
    Kind("rle_size", "error", "RLE of another size than the image", "RLE of another size than the image",
         _OBJECTS_LEFT_OUT, "left out"),
    Kind("rle_counts", "error",
         "RLE whose counts are not the image's pixels", "RLE whose counts are not the image's pixels",
         _OBJECTS_LEFT_OUT, "left out"),
    Kind("rle_object", "note", "objects that are no crowds with RLE for polygons",
         "object that is no crowd with RLE for polygons",
         "read as bitmaps, the polygons of their images too", _AS_IT_IS),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _KINDS}
NOT_TO_MEND = ("boxes_as_corners", "boxes_as_fractions")
