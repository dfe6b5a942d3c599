"""NVIDIA Triton: the model repository that `opal-deploy export --triton` writes, and the backend of its explain model.

Triton's Python needs only the base install of opal-deploy: no torch, onnx or ONNX Runtime.
"""
