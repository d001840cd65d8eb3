"""Array annotations, one letter per meaning.

``B`` batch, ``T`` query tokens of this call, ``S`` cached tokens, ``N`` query heads, ``K`` KV
heads, ``G`` = N/K, ``H`` head dim, ``D`` model dim, ``F`` MLP dim, ``V`` vocabulary, ``L`` layers,
``P`` tokens per KV block, ``M`` blocks per sequence, ``C`` compressed keys, ``R`` selected blocks,
``Z`` device slots, ``W`` diffusion block width, ``U`` denoising steps.

Annotations are documentation: nothing is checked at run time.
"""

from __future__ import annotations

from jax import Array
from jaxtyping import Bool, Float, Int, Num

__all__ = ["Array", "Bool", "Float", "Int", "Num"]
