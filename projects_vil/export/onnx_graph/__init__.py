"""What is in an ONNX file, and who can run it."""
