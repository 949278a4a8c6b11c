"""Models as ONNX or torch.export files that run without subquad."""
