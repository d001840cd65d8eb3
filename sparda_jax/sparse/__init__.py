"""Block selection policies: what `SparseConfig` means in terms of the kernels' arguments."""
