"""Block diffusion: masks, denoising rules, decoding block by block, training."""
