"""One call of a transformers model, its arguments read once."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.hf.documents import Documents, of_bounds, of_positions
from flashmask_hf.hf.models import ModelState, state_of
from flashmask_hf.names import NAMES, VECTORS


class _Current(threading.local):  # Dynamo can trace it, but no ContextVar, and no attribute that a thread never set
    call: Call | None = None


class _Traced:  # what compiled code sets before a graph break
    call: Call | None = None


current = _Current()
_traced = _Current() if torch.__version__ >= "2.13" else _Traced()  # Dynamo of 2.11 reads a thread-local's class
current.call = _traced.call = None  # a compiler guards on which attributes a thread has set


def current_calls() -> _Current | _Traced:
    """Return the holder of the innermost call, in compiled code another than in eager code."""
    return _traced if torch.compiler.is_compiling() else current


class Call:
    """One call of a transformers model. Properties read no tensor's values.

    Attributes:
        named: its arguments by name, unchecked.
        indices: the caller's mask indices, unchecked.
        tokens: the input_ids [B, S], else the inputs_embeds [B, S, D], or None.
        positions: of the tokens in their documents, [B or 1, S], or None.
        outer: the call of the model that this one is a submodel of.
        has_activated_lora: whether an adapter of PEFT in the model looks for `alora_invocation_tokens`.
        reads: number of masks and layers that read the document boundaries, with submodels.
        supplied: number of layers that received the call's mask, or mask indices.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Call | None = None):
        self.model, self.outer, self.config = model, outer, model.config
        self.implementation = model.config._attn_implementation
        self.is_ours = self.implementation in NAMES
        self.args, self.kwargs = args, kwargs
        self.named = kwargs
        if args:
            self.named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        self.indices: Any = self.named.get(VECTORS)
        tokens = self.named.get("input_ids")
        tokens = self.named.get("inputs_embeds") if tokens is None else tokens
        self.tokens: Any = tokens if isinstance(tokens, Tensor) and tokens.dim() > 1 else None
        self.positions = self._find_positions()
        self.reads = self.supplied = 0
        self._documents: Any = False
        adapters = model.__dict__.get("peft_config", {})
        self.has_activated_lora = any([getattr(x, "alora_invocation_tokens", None) for x in adapters.values()])
        self.state: ModelState = state_of(model)

    def changed(self, named: dict[str, Any]) -> Call:
        """Return the same call with other arguments."""
        return Call(self.model, (), named, self.outer)

    def tensor(self, name: str, dim: int | None = None) -> Tensor | None:
        """Return an argument if it is a tensor with `dim` axes, else None."""
        found = self.named.get(name)
        return found if isinstance(found, Tensor) and dim in (None, found.dim()) else None

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__

    @property
    def bounds(self) -> Tensor | None:
        """The `cu_seq_lens_q` [documents + 1] of several documents."""
        found = self.tensor("cu_seq_lens_q", 1)
        return found if found is not None and found.shape[0] > 2 else None

    @property
    def padding(self) -> Tensor | None:
        """The tokens that a 2D mask shows, bool [B, S]."""
        mask, tokens = self.tensor("attention_mask", 2), self.tokens
        if mask is None or tokens is None or mask.shape[1] < tokens.shape[1]:
            return None
        return mask[:, -tokens.shape[1] :].to(torch.bool)

    @property
    def documents(self) -> Documents | None:
        """The documents by `cu_seq_lens_q`, else by positions; None if the call has neither."""
        if self._documents is False:
            self._documents = self._find_documents()
        return self._documents

    def _find_positions(self) -> Tensor | None:
        found, tokens = self.tensor("position_ids"), self.tokens
        if found is None or found.dim() not in (2, 3) or (tokens is not None and found.shape[-1] != tokens.shape[1]):
            return None
        if found.dim() == 2:
            return found
        return found[0] if found.shape[0] == 4 or self.indices is not None else count_axes(found)

    def _find_documents(self) -> Documents | None:
        tokens, outer = self.tokens, self.outer
        if tokens is None or tokens.shape[1] == 1:
            return None
        marks = ("cu_seq_lens_q", "position_ids", "attention_mask")
        if outer is not None and all(outer.named.get(x) is self.named.get(x) for x in marks):
            return outer.documents
        if self.bounds is not None:
            return of_bounds(self.bounds, tokens.shape[1])
        return None if self.positions is None else of_positions(self.positions, self.padding)


def call_of(config: Any, length: int) -> Call | None:
    """Return the innermost call with a config of this class, which may be a copy, and rows of `length` tokens."""
    call = current_calls().call
    while call is not None and type(config) not in (type(call.config), type(call.config.get_text_config())):
        call = call.outer
    tokens = None if call is None else call.tokens
    return call if tokens is not None and tokens.shape[1] == length else None


def cache_of(kwargs: dict[str, Any]) -> Any:
    """Return the key-value cache among a model's keywords, `cache` since transformers 5.24, or None."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def count_axes(positions: Tensor) -> Tensor:
    """Return the number of tokens before each token of its document, int64 [B, S], of positions [3, B, S].

    A document starts where all axes are 0. A row of zeros has no documents.
    """
    start = (positions == 0).all(0)
    start = start & ~start.all(-1, keepdim=True)
    column = torch.arange(positions.shape[-1], device=positions.device)
    return column - torch.where(start, column, -1).cummax(-1).values


def record_documents(supplied: bool = False) -> None:
    """Record that a mask or a layer read the call's document boundaries, except in compiled code.

    Args:
        supplied: whether an attention layer received the caller's mask indices.
    """
    if not torch.compiler.is_compiling() and current.call is not None:
        current.call.reads += 1
        current.call.supplied += supplied
