"""sentence-transformers on flat rows: the texts of a batch one after another, without padding.

sentence-transformers (6.0 to 6.2) flattens batches for FlashAttention alone. Its pooling and losses read flat batches
with any attention.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from sentence_transformers import __version__
from sentence_transformers.base.modules import Transformer  # pyright: ignore[reportMissingImports]
from torch import nn
from transformers import modeling_flash_attention_utils as flash_attention

from flashmask_hf.names import FLASHMASK


def unpad_inputs(model: nn.Module) -> None:
    """Make a model of sentence-transformers train and encode on flat rows, without padding.

    Embeddings, losses and gradients equal the padded batch's, up to rounding. Only this model is changed, until its
    `unpad_inputs` is set. The model runs three times on two short texts, to check that they stay apart.

    Args:
        model: `SentenceTransformer` or `SparseEncoder`, with attention "flashmask".

    Raises:
        RuntimeError: this version of sentence-transformers flattens inputs in another way.
        ValueError: the model has another attention, or takes no flat rows, as a classification head; or its layers mix
            the texts of a row.

    Example:
        ```python
        import flashmask_hf
        from flashmask_hf.integrations.sentence_transformers import unpad_inputs
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer("Qwen/Qwen3-Embedding-0.6B", model_kwargs={"attn_implementation": "flashmask"})
        unpad_inputs(model)
        ```
    """
    if not hasattr(Transformer, "_can_flatten_inputs") or not hasattr(Transformer, "_is_flash_attention_requested"):
        raise RuntimeError(
            f"sentence-transformers {__version__} flattens inputs in a way that flashmask_hf does not know; install a "
            "version it was tested with, pip install 'sentence-transformers>=6,<6.3', or a newer flashmask-hf"
        )
    parts: list[Any] = [part for part in model.modules() if isinstance(part, Transformer)]
    names = {getattr(part.config, "_attn_implementation", None) for part in parts}
    if names != {FLASHMASK}:
        raise ValueError(
            f"unpad_inputs needs attn_implementation='flashmask', got {sorted(map(str, names))}; load the model with "
            "model_kwargs={'attn_implementation': 'flashmask'}"
        )
    for part in parts:
        was_training = part.training
        try:
            _flatten(part.eval())
        except Exception:
            part.can_flatten_inputs = False
            raise
        finally:
            part.train(was_training)


@torch.no_grad()
def _flatten(part: Any) -> None:
    """Make a transformer of sentence-transformers flatten texts, and check that they stay apart.

    sentence-transformers calls the model's `forward`, which the checks of model calls do not see.
    """
    name = type(part.model).__name__
    varlen = mock.patch.object(flash_attention, "lazy_import_flash_attention", return_value=((None, True), None))
    with varlen, mock.patch.object(part, "_is_flash_attention_requested", return_value=True):
        part.can_flatten_inputs = part._can_flatten_inputs()
    if not part.can_flatten_inputs:
        raise ValueError(
            f"{name} takes no flat rows of text in sentence-transformers; leave its inputs padded, or, if it is a "
            "causal reranker, call flashmask_hf.share_prefixes(cross_encoder[0].model)"
        )
    row = part.preprocess(["a b", "c d"])
    row = {key: x.to(part.model.device) if isinstance(x, torch.Tensor) else x for key, x in row.items()}
    ids, second = row["input_ids"], int(row["cu_seq_lens_q"][1])
    part.model(input_ids=ids, position_ids=row["position_ids"], cu_seq_lens_q=row["cu_seq_lens_q"])
    changed = torch.cat([(ids[:, :second] == 0).to(ids.dtype), ids[:, second:]], 1)  # another first text
    one, two = (part(row | {"input_ids": x})[part.module_output_name][:, second:] for x in (ids, changed))
    bound = 0.05 if one.dtype.itemsize == 2 else 1e-3  # experts compute tokens in groups, whose sizes change rounding
    if not (one - two).abs().max() <= bound * one.abs().max():  # NaN raises, too
        raise ValueError(f"{name} does not keep the texts of a flat row apart; leave its inputs padded")
