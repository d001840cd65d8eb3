"""Long-context LLM inference in JAX: host-resident KV cache, block-sparse attention.

Importing this package imports nothing else: pick what you need from the modules.
"""
