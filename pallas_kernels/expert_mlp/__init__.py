"""Expert MLP: SwiGLU of a mixture's experts over rows that are sorted by expert."""

from pallas_kernels.expert_mlp.api import expert_mlp

__all__ = ["expert_mlp"]
