"""Two staging buffers through which host blocks reach the device asynchronously."""

import jax
import numpy as np


class DoubleBuffer:
    """Gathers rows of a host array into staging memory and sends them by asynchronous `device_put`.

    While one buffer is on its way to the device the next rows are gathered into the other; a buffer
    is written again only when its last transfer has arrived.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding):
        self._buffers = [np.zeros(shape, dtype) for _ in range(2)]
        self._in_flight: list[jax.Array | None] = [None, None]
        self._sharding = sharding
        self._turn = 0

    @property
    def rows(self) -> int:
        """Rows one transfer carries."""
        return self._buffers[0].shape[0]

    def send(self, source: np.ndarray, indices: np.ndarray) -> jax.Array:
        """Sends ``source[indices]``; rows past ``len(indices)`` of the result hold stale data.

        Args:
          source: host rows ``[X, ...]``.
          indices: int32[n], n <= rows.

        Returns:
          A device array ``[rows, ...]`` whose transfer may still be under way.
        """
        buffer = self._buffers[self._turn]
        previous = self._in_flight[self._turn]
        if previous is not None:
            previous.block_until_ready()
        np.take(source, indices, axis=0, out=buffer[: len(indices)], mode="clip")
        # may_alias=False: on the CPU back end the "device" array would otherwise be this very
        # buffer, and the next gather would change it under a running program.
        sent = jax.device_put(buffer, self._sharding, may_alias=False)
        self._in_flight[self._turn] = sent
        self._turn = 1 - self._turn
        return sent
