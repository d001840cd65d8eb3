"""Teacher of the Forecast projections: attention mass on a fine grid, pooled to windows."""

from pallas_kernels.teacher_scores.api import teacher_scores

__all__ = ["teacher_scores"]
