"""Random delays in every queue of the engine: what is right by luck of timing alone comes out.

On the host before and after whatever is dispatched or copied; inside a decode program in front of
each layer's projections, copy and attention, as work that the data has to wait for.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.double_buffer import DoubleBuffer
from host_offload.host_pool import HostPool
from sparda_jax.engine.phases import TracedPhases
from sparda_jax.engine.programs import Program

QUEUES = (
    (Program, "__call__"),
    (HostPool, "store_layer"),
    (HostPool, "write_back"),
    (HostPool, "view"),
    (DoubleBuffer, "send"),
)


class Delays:
    """Delays until the monkeypatch is undone; programs traced meanwhile keep theirs.

    Attributes:
      sleeps: how often the host slept.
      traced: how many delays went into programs.
    """

    def __init__(self, monkeypatch, seed: int, *, seconds: float = 1e-3, size: int = 64):
        """Every sleep is shorter than `seconds`; the work is matrix products of `size`."""
        self.sleeps = self.traced = 0
        self._rng, self._seconds, self._size = np.random.default_rng(seed), seconds, size
        for owner, name in QUEUES:
            monkeypatch.setattr(owner, name, self._sleeping(getattr(owner, name)))
        for name in ("project", "fetch", "attend"):
            monkeypatch.setattr(TracedPhases, name, self._late(name, getattr(TracedPhases, name)))

    def _sleeping(self, function):
        def call(*args, **kwargs):
            self._sleep()
            result = function(*args, **kwargs)
            self._sleep()
            return result

        return call

    def _sleep(self):
        self.sleeps += 1
        if self._rng.random() < 0.5:
            time.sleep(self._rng.random() * self._seconds)

    def _late(self, name, phase):
        def call(phases, index, *args):
            if name == "fetch":
                cache, *before = args
                if cache.misses is not None:
                    source = self._after_work(cache.misses.source)
                    misses = dataclasses.replace(cache.misses, source=source)
                    args = (dataclasses.replace(cache, misses=misses), *before)
            else:
                args = (self._after_work(args[0]), *args[1:])
            return phase(phases, index, *args)

        return call

    def _after_work(self, array: jax.Array) -> jax.Array:
        """The same values, once up to ten matrix products are done."""
        self.traced += 1
        work = jnp.full((self._size, self._size), array.ravel()[0].astype(jnp.float32))
        for _ in range(self._rng.integers(0, 11)):
            work = jnp.tanh(work @ work)
        # Zero, which the compiler cannot know.
        return array + (work[0, 0] > 2e9).astype(array.dtype)
