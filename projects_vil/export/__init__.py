"""Export detectors to TorchScript, ONNX, torch.export, AOTInductor and OpenVINO, and check their detections."""

from projects_vil.export.exporter import describe_model, export_detector
from projects_vil.export.formats import FORMATS, check_format
from projects_vil.export.parity import describe_report, eager_detections, example_image
from projects_vil.export.runtime import ExportedModel, metadata_path, pad_image, paste_masks, to_instances
from projects_vil.export.traceable import make_exportable
