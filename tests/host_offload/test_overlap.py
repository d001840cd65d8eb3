"""Inlining for annotated streams; that two streams overlap and agree is tested on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload import overlap


def _function(x, weights):
    picked = jnp.where(x > 0, x, jnp.clip(x, -1, 1))
    return jnp.pad(picked @ weights["w"], 1), jax.jit(lambda y: (y, y * 2))(x)


def test_inlined_gives_the_same_without_jits():
    rng = np.random.default_rng(0)
    x, weights = jnp.asarray(rng.normal(size=(3, 4))), {"w": jnp.asarray(rng.normal(size=(4, 2)))}
    inlined = overlap.inlined(_function)
    names = {e.primitive.name for e in jax.make_jaxpr(_function)(x, weights).eqns}
    assert names & {"jit", "pjit"}
    names = {e.primitive.name for e in jax.make_jaxpr(inlined)(x, weights).eqns}
    assert not names & {"jit", "pjit"}
    got, expected = inlined(x, weights), _function(x, weights)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def _loops(x, flag):
    def body(_, y):
        return jax.lax.cond(flag, lambda y: jnp.where(y > 0, y, 2 * y), lambda y: jnp.abs(y), y)

    y = jax.lax.fori_loop(0, flag + jnp.int32(2), body, x)
    return jax.lax.scan(lambda c, row: (jnp.clip(c + row, -9, 9), row), y[0], y)


def test_inlined_reaches_into_loops_and_conditionals():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4)))
    inlined = overlap.inlined(_loops)
    assert "jit[" in str(jax.make_jaxpr(_loops)(x, True))
    text = str(jax.make_jaxpr(inlined)(x, True))
    assert "jit[" not in text
    assert all(word in text for word in ("cond[", "while[", "scan["))
    for flag in (True, False):
        jax.tree.map(np.testing.assert_array_equal, inlined(x, flag), _loops(x, flag))


def test_stream_stands_in_the_program():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    annotated = overlap.on_stream(lambda x: jnp.where(x > 0, x @ x, 0), 3)
    exported = jax.export.export(jax.jit(annotated), platforms=["cuda"])(x)
    assert '_xla_stream_annotation = "3"' in exported.mlir_module()


def test_stream_zero_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        overlap.on_stream(lambda x: x, 0)
