"""The names of TensorRT's and TensorRT for RTX's Python bindings that this package uses."""

# methods, properties and members of enums by class: those that run engines, which the lean runtime has too
RUNTIME_NAMES = {
    "ILogger": [],
    "Runtime": ["deserialize_cuda_engine"],
    "ICudaEngine": [
        "num_io_tensors", "get_tensor_name", "get_tensor_dtype", "get_tensor_shape", "create_execution_context",
    ],
    "IExecutionContext": ["set_input_shape", "set_tensor_address", "execute_async_v3"],
}  # fmt: skip
NAMES = RUNTIME_NAMES | {
    "Builder": [
        "create_network", "create_builder_config", "create_optimization_profile", "build_serialized_network",
    ],
    "INetworkDefinition": ["num_inputs", "get_input"],
    "IOptimizationProfile": ["set_shape"],
    "OnnxParser": ["parse", "num_errors", "get_error"],
    "ParserError": ["node", "node_name", "node_operator", "desc"],
    "ITensor": ["name", "shape"],
    "IBuilderConfig": ["clear_flag", "set_flag", "add_optimization_profile", "progress_monitor"],
    "BuilderFlag": ["TF32", "VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME"],
    "IProgressMonitor": ["phase_start", "phase_finish", "step_complete"],
}  # fmt: skip
RTX_NAMES = {
    "ICudaEngine": ["create_runtime_config"],
    "IRuntimeConfig": [
        "create_runtime_cache", "set_runtime_cache", "dynamic_shapes_kernel_specialization_strategy",
        "cuda_graph_strategy",
    ],
    "IRuntimeCache": ["serialize", "deserialize"],
    "IBuilderConfig": ["num_compute_capabilities", "set_compute_capability"],
    "ComputeCapability": ["SM75", "SM80", "SM86", "SM89", "SM120"],
    "DynamicShapesKernelSpecializationStrategy": ["EAGER"],
    "CudaGraphStrategy": ["WHOLE_GRAPH_CAPTURE"],
}  # fmt: skip


def find_missing(module, names):
    """Return what of `names` a bindings module lacks."""
    return [
        f"{kind}.{name}" for kind, members in names.items() for name in members
        if not hasattr(getattr(module, kind, None), name)
    ]  # fmt: skip
