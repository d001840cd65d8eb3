import pytest

from sparda_jax.evaluation.agreement import equal_share


@pytest.mark.parametrize(
    "tokens,others,share",
    [
        ([[1, 2, 3]], [[1, 2, 3]], 1.0),
        ([[1, 2, 3, 4]], [[1, 2, 9, 4]], 0.75),
        ([[1, 2]], [[3, 4]], 0.0),
        ([[1, 2]], [[1, 2, 3, 4]], 0.5),  # the longer counts, whichever it is
        ([[1, 2, 3, 4]], [[1, 2]], 0.5),
        ([[1], [1, 2, 3]], [[1], [9, 9, 9]], 0.25),  # of all tokens, not of all requests
        ([[]], [[]], 1.0),
        ([[]], [[5]], 0.0),
        ([], [], 1.0),
    ],
)
def test_equal_share(tokens, others, share):
    assert equal_share(tokens, others) == share
    assert equal_share(others, tokens) == share


def test_shifted_tokens_do_not_agree():
    """Position by position: a token that was dropped early costs all that follow."""
    assert equal_share([[1, 2, 3, 4]], [[2, 3, 4, 5]]) == 0


def test_other_number_of_requests():
    with pytest.raises(ValueError, match="shorter"):
        equal_share([[1], [2]], [[1]])
