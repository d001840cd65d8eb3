"""Settings of the block engine and the sizes of a batch, checked before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from sparda_jax.config import ModelConfig, SamplingParams
from sparda_jax.diffusion.config import DenoiseParams, diffusion_of
from sparda_jax.engine.plan import check_prompt


@dataclasses.dataclass(frozen=True)
class BlockEngineConfig:
    """How the block engine runs a batch.

    Attributes:
        block_size: W, to be sure of it; None: the weights'. Another than theirs is refused.
        dual_cache: tokens of the sub-blocks that all requests denoise in: within one, forwards
            after the first run it alone, against the KV that the block's other tokens had then
            (Fast-dLLM v2; approximate). None: every forward runs the block.
        kv_block: P, tokens of a KV block, a multiple of the diffusion block.
        prefill_chunk: prompt tokens per prefill call.
        blocks_per_call: diffusion blocks of each request per compiled call.
        max_length: prompt plus generated tokens; None: what the model declares.
        device_kv_bytes: limit for KV on the device; None: no limit.
    """

    block_size: int | None = None
    dual_cache: int | None = None
    kv_block: int = 64
    prefill_chunk: int = 512
    blocks_per_call: int = 1
    max_length: int | None = None
    device_kv_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_block", "prefill_chunk", "blocks_per_call"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Static sizes of one batch.

    Attributes:
        aligned: whole diffusion blocks of each prompt, tokens.
        chunk: prompt tokens per prefill call.
        padded: prompt tokens that prefill runs.
        num_blocks: M, KV blocks a sequence can hold.
        cache_shape: of one layer, `[B, K, M, 2, P, H]`.
        kv_bytes: of all layers.
    """

    aligned: tuple[int, ...]
    chunk: int
    padded: int
    num_blocks: int
    cache_shape: tuple[int, ...]
    kv_bytes: int


def settings_of_each(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    denoise: DenoiseParams | Sequence[DenoiseParams] | None,
) -> tuple[Sequence[SamplingParams], Sequence[DenoiseParams]]:
    """Sampling and denoising settings of every request.

    Args:
        config: of the model.
        prompts: token ids of each request.
        sampling: settings for all, or one for each.
        denoise: likewise; None: what the family's authors publish.

    Raises:
        ValueError: as many settings as there are prompts were not given.
    """
    if denoise is None:
        denoise = DenoiseParams.of_family(config)
    requests = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    rules = [denoise] * len(prompts) if isinstance(denoise, DenoiseParams) else denoise
    for what, given in (("sampling", requests), ("denoising", rules)):
        if len(given) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(given)} {what} settings")
    return requests, rules


def check_block_size(config: ModelConfig, settings: BlockEngineConfig) -> None:
    """Raises what `diffusion_of` does, and refuses sizes that do not fit together.

    Raises:
        ValueError: a block size that the weights were not trained for.
        NotImplementedError: a diffusion block that does not divide the KV block.
    """
    facts, _ = diffusion_of(config)
    if settings.block_size not in (None, facts.block_size):
        raise ValueError(
            f"the weights were trained for blocks of {facts.block_size} tokens, not "
            f"{settings.block_size}"
        )
    if settings.kv_block % facts.block_size:
        raise NotImplementedError(
            f"diffusion blocks of {facts.block_size} do not divide KV blocks of "
            f"{settings.kv_block}: choose a kv_block that is a multiple"
        )


def check_dual_cache(settings: BlockEngineConfig, rules: Sequence[DenoiseParams]) -> None:
    """Refuses requests that do not denoise in the sub-blocks of the engine's dual cache.

    Raises:
        ValueError: naming the request and both sizes.
    """
    if settings.dual_cache is None:
        return
    for row, rule in enumerate(rules):
        if rule.sub_block != settings.dual_cache:
            raise ValueError(
                f"the dual cache runs sub-blocks of {settings.dual_cache} tokens, request {row} "
                f"denoises in sub-blocks of {rule.sub_block}"
            )


def plan_blocks(
    config: ModelConfig,
    settings: BlockEngineConfig,
    prompts: Sequence[Sequence[int]],
    requests: Sequence[SamplingParams],
    dtype: jnp.dtype,
) -> BlockPlan:
    """Checks a batch against the model's limits and works out its sizes.

    Raises:
        ValueError: no prompt, an empty prompt, a token outside the vocabulary, or a length beyond
            the model's or the engine's limit.
        NotImplementedError: log-probabilities are asked for.
    """
    if any(request.logprobs is not None for request in requests):
        raise NotImplementedError(
            "logprobs: a token of a block has one per denoising step; block decoding reports none"
        )
    if not prompts:
        raise ValueError("no prompt: the batch is empty")
    limit = settings.max_length or config.max_position_embeddings
    width, size = diffusion_of(config)[0].block_size, settings.kv_block
    canvas = 0
    for row, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        check_prompt(f"prompt {row}", prompt, config)
        needed = -(-(len(prompt) + request.max_new_tokens) // width) * width
        if needed > limit:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens and asks for {request.max_new_tokens} "
                f"more: in blocks of {width} these are {needed}, over the limit of {limit} tokens"
            )
        canvas = max(canvas, needed)
    aligned = tuple(len(prompt) // width * width for prompt in prompts)
    longest = -(-max(aligned) // size) * size
    chunk = max(min(settings.prefill_chunk // size * size, longest), size)
    padded = -(-longest // chunk) * chunk
    num_blocks = -(-max(canvas, padded) // size)
    shape = (len(prompts), config.num_kv_heads, num_blocks, 2, size, config.head_dim)
    total = config.num_layers * int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    return BlockPlan(aligned, chunk, padded, num_blocks, shape, total)
