"""The backbones behind detectron2's interface, and FPN over them; importing it registers the builders."""
