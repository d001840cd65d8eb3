"""The block-sparse prefill kernel on a GPU, against the reference in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import block_sparse_attention, specs

pytestmark = pytest.mark.gpu


def _case(rng, *, batch, tokens, kv_heads, group, head_dim, block_size, blocks, start, every=False):
    """Lists of random length and order, -1 anywhere, some empty, or all blocks."""
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    ids = rng.integers(0, blocks, (batch, kv_heads, tokens, 1))
    if every:
        ids = np.broadcast_to(np.arange(blocks), (batch, kv_heads, tokens, blocks))
    else:
        near = rng.integers(-1, blocks, (batch, kv_heads, 1, 6))
        ids = np.concatenate([ids, np.broadcast_to(near, (batch, kv_heads, tokens, 6))], axis=-1)
        ids = np.where(rng.random(ids.shape[:3])[..., None] < 0.1, -1, ids)
    return (
        normal(batch, tokens, kv_heads * group, head_dim),
        normal(batch, kv_heads, blocks, 2, block_size, head_dim),
        jnp.asarray(ids, jnp.int32),
        jnp.broadcast_to(start + jnp.arange(tokens, dtype=jnp.int32), (batch, tokens)),
    )


CASES = [
    {"batch": 2, "tokens": 1, "kv_heads": 2, "group": 16, "head_dim": 128, "start": 63},
    {"batch": 1, "tokens": 131, "kv_heads": 2, "group": 16, "head_dim": 128, "start": 1000},
    {"batch": 1, "tokens": 64, "kv_heads": 1, "group": 8, "head_dim": 128, "start": 0,
     "block_size": 32},
    {"batch": 2, "tokens": 65, "kv_heads": 3, "group": 3, "head_dim": 64, "start": 300},
    {"batch": 1, "tokens": 150, "kv_heads": 2, "group": 1, "head_dim": 64, "start": 900,
     "block_size": 128},
    {"batch": 1, "tokens": 63, "kv_heads": 1, "group": 4, "head_dim": 128, "start": 200,
     "block_size": 16},
    {"batch": 1, "tokens": 100, "kv_heads": 1, "group": 16, "head_dim": 64, "start": 0,
     "every": True},
]  # fmt: skip


# The bias is one branch: two shapes show it.
@pytest.mark.parametrize(
    ("index", "biased"), [*((index, False) for index in range(len(CASES))), (1, True), (3, True)]
)
def test_equals_reference(index, biased):
    rng = np.random.default_rng(index)
    case = {"block_size": 64, "blocks": 40 if index else 2} | CASES[index]
    q, kv, ids, positions = _case(rng, **case)
    bias = jnp.asarray(rng.normal(size=(*kv.shape[:3], kv.shape[4])), jnp.float32)
    options = {"key_bias": bias if biased else None, "return_lse": True}
    run = jax.jit(lambda *a: block_sparse_attention(*a, **options, implementation="mosaic"))
    # Freed memory full of NaN: an output element that is not written would show.
    jax.block_until_ready(jnp.full((64, 2**20), jnp.nan)).delete()
    out, lse = run(q, kv, ids, positions)
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(lambda *a: block_sparse_attention(*a, **options, implementation="xla"))
        ref, ref_lse = reference(q, kv, ids, positions)
    ref = np.asarray(ref, np.float64)
    assert np.linalg.norm(np.asarray(out, np.float64) - ref) < 5e-3 * np.linalg.norm(ref)
    np.testing.assert_allclose(lse, ref_lse, atol=1e-3)
    again = run(q, kv, ids, positions)
    assert (np.asarray(again[0]) == np.asarray(out)).all()
    assert (np.asarray(again[1]) == np.asarray(lse)).all()


def test_long_prompt():
    spec = specs.Spec(32768)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, spec.tokens, 32, 128)), jnp.bfloat16)
    kv = jnp.asarray(rng.normal(size=(1, 2, spec.tokens // 64, 2, 64, 128)), jnp.bfloat16)
    ids = specs.drifting_lists(spec, 0.5)
    positions = jnp.arange(spec.tokens, dtype=jnp.int32)[None]
    out = block_sparse_attention(q, kv, ids, positions, implementation="mosaic")
    some = rng.choice(spec.tokens, 32, replace=False)
    with jax.default_matmul_precision("highest"):
        ref = block_sparse_attention(
            q[:, some], kv, ids[:, :, some], positions[:, some], implementation="xla"
        )
    ref = np.asarray(ref, np.float64)
    error = np.asarray(out[:, some], np.float64) - ref
    assert np.linalg.norm(error) < 5e-3 * np.linalg.norm(ref)
