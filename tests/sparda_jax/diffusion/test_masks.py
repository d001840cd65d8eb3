"""The masks that the published code builds, and what they are made of."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.diffusion.masks import block_causal_mask, last_visible, training_mask

from .conftest import packed_training_mask

CASES = Path(__file__).parents[2] / "data" / "block_diffusion" / "training_mask"


@pytest.mark.parametrize(("length", "width"), [(8, 4), (64, 32), (96, 32)])
def test_training_mask(length, width):
    expected = np.load(CASES / f"mask_n{length}_B{width}.npz")["mask"]
    np.testing.assert_array_equal(training_mask(length, width), expected)


def test_packed_training_mask():
    case = np.load(CASES / "mask_packed_B4.npz")
    found = packed_training_mask(case["lengths"].tolist(), 4)
    np.testing.assert_array_equal(found, case["mask"])


@pytest.mark.parametrize("width", [4, 32])
def test_block_causal_mask(width):
    case = np.load(CASES.parent / "sdar_tiny" / "block_causal_logits.npz")
    expected = case[f"mask_b{width}"]
    np.testing.assert_array_equal(block_causal_mask(len(expected), width), expected)
    # The clean half of a training row is the inference mask.
    clean = training_mask(len(expected), width)[len(expected) :, len(expected) :]
    np.testing.assert_array_equal(clean, expected)


def test_causal_clean_half_changes_only_the_clean_half():
    usual, causal = training_mask(8, 4), training_mask(8, 4, causal_clean=True)
    np.testing.assert_array_equal(causal[:8], usual[:8])
    np.testing.assert_array_equal(causal[8:, 8:], np.tri(8, dtype=bool))
    assert last_visible(jnp.array([0, 3, 4]), 4).tolist() == [3, 3, 7]
    assert last_visible(jnp.array([0, 3, 4]), 4, causal=True).tolist() == [0, 3, 4]
