"""Names and colours of the classes of the datasets that are registered without a key."""

from detectron2.data.datasets.builtin_meta import ADE20K_SEM_SEG_CATEGORIES

# In drawings: circles red, squares green, triangles blue, as they are in the images.
SHAPES_COLORS = [(255, 80, 80), (80, 255, 80), (90, 150, 255)]
BACKGROUND_COLOR = (90, 90, 90)
SHAPES_CLASSES = ("circle", "square", "triangle")
SHAPES_SEM_SEG_CLASSES = ("background", *SHAPES_CLASSES)
SHAPES_STUFF_CLASSES = ("things", "background")
ADE20K_CLASSES = tuple(ADE20K_SEM_SEG_CATEGORIES)
