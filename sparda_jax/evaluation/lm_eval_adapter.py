r"""The model as lm-evaluation-harness sees it: `sparda_jax`, in any attention mode.

    python -m sparda_jax.evaluation.lm_eval_adapter --model sparda_jax \
        --model_args pretrained=default,mode=sparda --tasks <names> --batch_size 8

This is the harness's own command line with our model registered. From Python: import this module,
then `lm_eval.simple_evaluate(model="sparda_jax", ...)`, or pass a `SpardaLM` as `model`.
Log-likelihoods come from the engine's prefill in its mode, answers from the engine's decode. Models
of block diffusion: `lm_eval_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparda_jax.evaluation.lm_eval_base import HarnessLM  # first: names the extra

# isort: split
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sparda_jax.cli import load_selector
from sparda_jax.config import EngineConfig, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation.generation import EngineAnswerer
from sparda_jax.evaluation.likelihood import score_sequences
from sparda_jax.forecast.files import forecast_policy
from sparda_jax.tokenization import Tokenizer


@register_model("sparda_jax")
class SpardaLM(HarnessLM):
    """An autoregressive model with exact log-likelihoods.

    Attributes:
        max_length: tokens that a log-likelihood is conditioned on at most.
    """

    def __init__(
        self,
        pretrained: str = "default",
        *,
        mode: str | None = None,
        offload: str = "none",
        forecast: str | None = None,
        length_step: int = 256,
        **shared: Any,
    ):
        """Loads a model, or takes an engine that is there.

        Args:
            pretrained: "default", a directory, a GGUF file or a hub id.
            mode: attention mode; None: dense.
            offload: "none" or "host".
            forecast: weights for mode "sparda"; None: those that ship with the default model.
            length_step: lengths are rounded up to multiples, so that few programs are compiled.
            shared: what every model of the harness has, see `HarnessLM`.

        Raises:
            NotImplementedError: a batch size to be found out, another device.
            ValueError: settings that contradict each other.
        """
        mode = mode or "dense"
        if mode == "sparda" and forecast is None and pretrained == "default":
            forecast = "default"

        def start(model: Any, tokenizer: Tokenizer, lengths: dict[str, Any]) -> Engine:
            sparse = forecast_policy(forecast) if forecast else None
            config = EngineConfig(
                mode=mode,  # type: ignore[arg-type]
                offload="none" if mode == "dense" else offload,  # type: ignore[arg-type]
                length_step=length_step,
                **lengths,
            )
            selector = load_selector(mode, model, tokenizer, forecast)
            return Engine(model, sparse=sparse or SparseConfig(), config=config, **selector)

        super().__init__(start, EngineAnswerer, pretrained=pretrained, **shared)
        # The last token of a sequence is only predicted.
        self.max_length = self.limit - 1

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Of each continuation given its context, and whether greedy decoding says it.

        Raises:
            ValueError: a continuation that is empty, or longer than the model's limit.
        """
        for number, (_, _, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"the continuation of request {number} has {len(continuation)} tokens, "
                    f"expected 1 to {self.max_length}"
                )
        rows = [(context + cont)[-self.max_length - 1 :] for _, context, cont in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for indices in self.batches([len(row) for row in rows]):
            scores = score_sequences(self.engine, [rows[i] for i in indices])
            for i, score in zip(indices, scores, strict=True):
                size = len(requests[i][2])
                log_p = score.log_p[len(score.log_p) - size :].astype("float64")
                found[i] = float(log_p.sum()), bool(score.likeliest[-size:].all())
        for (key, _, _), result in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of the maximum length that predict every token once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners = []
        for number, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for pair in pairs:
                context, continuation = make_disjoint_window(pair)
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += log_p
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    import sparda_jax.evaluation.lm_eval_blocks  # noqa: F401  registers its model

    cli_evaluate()


if __name__ == "__main__":
    main()
