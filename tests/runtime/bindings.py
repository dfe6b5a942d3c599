"""The names of TensorRT's and TensorRT for RTX's Python bindings that this package uses, compared with a wheel."""

import re

# methods by class, with the types of the arguments that they are called with; a constructor is `__init__`
CALLS = {
    "ILogger": {"__init__": []},
    "Runtime": {"__init__": ["ILogger"], "deserialize_cuda_engine": ["Buffer"]},
    "ICudaEngine": {
        "get_tensor_name": ["int"], "get_tensor_dtype": ["str"], "get_tensor_shape": ["str"],
        "create_execution_context": [],
    },
    "IExecutionContext": {
        "set_input_shape": ["str", "tuple"], "set_tensor_address": ["str", "int"], "execute_async_v3": ["int"],
    },
    "Refitter": {"__init__": ["ICudaEngine", "ILogger"], "refit_cuda_engine": []},
    "OnnxParserRefitter": {"__init__": ["Refitter", "ILogger"], "refit_from_file": ["str"]},
    "Builder": {
        "__init__": ["ILogger"], "create_network": ["int"], "create_builder_config": [],
        "create_optimization_profile": [], "build_serialized_network": ["INetworkDefinition", "IBuilderConfig"],
    },
    "INetworkDefinition": {"get_input": ["int"]},
    "IOptimizationProfile": {"set_shape": ["str", "tuple", "tuple", "tuple"]},
    "OnnxParser": {"__init__": ["INetworkDefinition", "ILogger"], "parse": ["Buffer"], "get_error": ["int"]},
    "ParserError": {"node": [], "node_name": [], "node_operator": [], "desc": []},
    "IBuilderConfig": {
        "set_flag": ["BuilderFlag"], "clear_flag": ["BuilderFlag"],
        "add_optimization_profile": ["IOptimizationProfile"],
        "set_memory_pool_limit": ["MemoryPoolType", "int"], "create_timing_cache": ["bytes"],
        "set_timing_cache": ["ITimingCache", "bool"],
    },
    "ITimingCache": {"serialize": []},
    "IProgressMonitor": {"__init__": []},
}  # fmt: skip
# properties and members of enums
NAMES = {
    "IProfiler": ["report_layer_time"],
    "IExecutionContext": ["profiler"],
    "Runtime": ["engine_host_code_allowed"],
    "ICudaEngine": ["num_io_tensors"],
    "INetworkDefinition": ["num_inputs"],
    "OnnxParser": ["num_errors"],
    "ITensor": ["name", "shape"],
    "IBuilderConfig": ["progress_monitor", "builder_optimization_level", "hardware_compatibility_level"],
    "BuilderFlag": ["TF32", "VERSION_COMPATIBLE", "STRIP_PLAN", "REFIT_IDENTICAL"],
    "MemoryPoolType": ["WORKSPACE"],
    "HardwareCompatibilityLevel": ["AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"],
    "IProgressMonitor": ["phase_start", "phase_finish", "step_complete"],
}
RTX_CALLS = {
    "ICudaEngine": {"create_runtime_config": [], "create_execution_context": ["IRuntimeConfig"]},
    "IRuntimeConfig": {"create_runtime_cache": [], "set_runtime_cache": ["IRuntimeCache"]},
    "IRuntimeCache": {"serialize": [], "deserialize": ["bytes"]},
    "IBuilderConfig": {"set_compute_capability": ["ComputeCapability", "int"]},
}
RTX_NAMES = {
    "IRuntimeConfig": ["dynamic_shapes_kernel_specialization_strategy", "cuda_graph_strategy"],
    "IBuilderConfig": ["num_compute_capabilities"],
    "ComputeCapability": ["CURRENT", "SM75", "SM80", "SM86", "SM89", "SM120"],
    "DynamicShapesKernelSpecializationStrategy": ["EAGER"],
    "CudaGraphStrategy": ["WHOLE_GRAPH_CAPTURE"],
}
# what the bindings' texts call types that several Python types satisfy
_ACCEPT = {
    "int": "int|SupportsInt|capsule|SupportsIndex", "tuple": "Dims|Sequence|tuple|list", "str": "str",
    "bytes": "bytes|buffer|Buffer", "Buffer": "bytes|buffer|Buffer|capsule|handle|object", "bool": "bool",
}  # fmt: skip


def find_mismatches(module, calls, names):
    """Return what of `calls` and `names` a bindings module lacks or takes other arguments for."""
    missing = [f"{kind}.{name}" for kind in names for name in names[kind] if not hasattr(getattr(module, kind), name)]
    for kind, methods in calls.items():
        for name, arguments in methods.items():
            method = getattr(getattr(module, kind, None), name, None)
            signatures = _read_signatures(name, method)
            if not any(_fits(arguments, signature) for signature in signatures):
                missing.append(f"{kind}.{name}({', '.join(arguments)}): {signatures}")
    return missing


def _read_signatures(name, method):
    """Return the parameters of each overload from pybind11's text, without `self`: (type, has a default)."""
    found = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) ->", method.__doc__ or "", re.M)
    signatures = []
    for text in found:
        depth, parts = 0, [""]
        for letter in text:
            depth += (letter in "[(<{") - (letter in "])>}")
            if letter == "," and not depth:
                parts.append("")
            else:
                parts[-1] += letter
        signatures.append([(part.partition(":")[2], "=" in part) for part in parts[1:]])
    return signatures


def _fits(arguments, signature):
    needed = sum(not default for _, default in signature)
    return needed <= len(arguments) <= len(signature) and all(
        re.search(rf"\b({_ACCEPT.get(given, given)})\b", kind)
        for given, (kind, _) in zip(arguments, signature, strict=False)
    )
