"""Shape checks that name the argument, its shape and the layout it should have."""

import jax


def match(*arrays: tuple[str, jax.Array | jax.ShapeDtypeStruct | None, str]) -> dict[str, int]:
    """Binds the letters of the layouts to sizes, the same letter to the same size everywhere.

    Args:
        *arrays: (name, array or None, layout); a layout is space-separated letters or
            numbers, as in ``"B K M 2 P H"``.  None is skipped.

    Returns:
        Letter -> size.

    Raises:
        ValueError: a rank or a size that does not fit.
    """
    sizes: dict[str, int] = {}
    for name, array, layout in arrays:
        if array is None:
            continue
        letters = layout.split()
        fits = len(array.shape) == len(letters)
        for letter, size in zip(letters, array.shape, strict=False):
            expected = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            fits = fits and expected == size
        if not fits:
            known = ", ".join(f"{a}={sizes[a]}" for a in letters if a in sizes)
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}, expected [{', '.join(letters)}]"
                + (f" with {known}" if known else "")
            )
    return sizes


def group_size(num_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head, G = N / K.

    Raises:
        ValueError: N is not a multiple of K.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    return num_heads // num_kv_heads
