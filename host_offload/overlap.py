"""The copy of one layer behind another's work, inside one compiled program.

One CUDA graph, in which whatever the data allows runs side by side; nothing is annotated.  Two
annotated streams, the other way that XLA offers, were never faster (docs/decode_kernels.md).  What
is to overlap must lie in one graph: a loop, a sort of XLA's own or a callback in between cuts it.
And a buffer that the copy reads must not be one that XLA uses again for something else while the
copy runs: in the graph that something would wait for it.
"""

# For ``.lower().compile(compiler_options=...)``, which only a top-level program takes.
CONCURRENT_OPTIONS: dict[str, str | int] = {
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_gpu_graph_min_graph_size": 1,
}

# Added on several devices: their sums join the graph. Left out of it, each would cut it in two, and
# a copy could run beside what lies between two of them only. The rest of the list is XLA's default.
COLLECTIVE_OPTIONS: dict[str, str | int] = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,COLLECTIVES"
    ),
}
