"""NVIDIA Triton: the model repository that `opal-deploy export --triton` writes, and the backend of its explain model.

Neither needs torch, onnx or ONNX Runtime; in Triton's Python only the base install of opal-deploy has to be there.
"""
