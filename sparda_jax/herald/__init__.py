"""HERALD: the CPU selects, the GPU denoises, the KV crosses once per block."""
