"""Two staging buffers through which host blocks reach the device asynchronously."""

import jax
import numpy as np


class DoubleBuffer:
    """Gathers rows of a host array into staging memory and sends them by asynchronous `device_put`.

    While one buffer is on its way to the device the next rows are gathered into the other; a buffer
    is written again only when its last transfer has arrived.

    Where the device's memory is the host's (the CPU back end) there is nothing to overlap, and
    `device_put` hands out an aligned numpy buffer itself, whatever its ``may_alias`` says; programs
    that still read it would see the next rows. So every transfer has a buffer of its own there.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding):
        self._buffers = [np.zeros(shape, dtype) for _ in range(2)]
        self._in_flight: list[jax.Array | None] = [None, None]
        self._sharding = sharding
        devices: set[jax.Device] = sharding.device_set
        self._aliases = any(device.platform == "cpu" for device in devices)
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

        Raises:
          ValueError: more indices than rows.
        """
        if len(indices) > self.rows:
            raise ValueError(f"{len(indices)} rows exceed the {self.rows} of a transfer")
        buffer = self._buffers[self._turn]
        if self._aliases:
            buffer = np.empty_like(buffer)
        previous = self._in_flight[self._turn]
        if previous is not None:
            previous.block_until_ready()
        np.take(source, indices, axis=0, out=buffer[: len(indices)], mode="clip")
        sent = jax.device_put(buffer, self._sharding)
        self._in_flight[self._turn] = sent
        self._turn = 1 - self._turn
        return sent
