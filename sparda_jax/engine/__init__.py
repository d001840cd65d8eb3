"""The engine: explicit state, prefill, decode, sampling and the loop that drives them."""
