"""Registration with transformers, and six changes that its interfaces do not offer, one section each.

The changes act for this package's attention implementations or batch keys only, in transformers 5.17 to 5.24.
Unexpected code raises a RuntimeError that names these versions. Applying a patch again changes nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.utils import generic

from flashmask_hf.hf.attention import attention_forward
from flashmask_hf.hf.call import Call, call_of, current_calls, record_documents
from flashmask_hf.hf.checks import run_checks
from flashmask_hf.hf.documents import check_one_document, of_positions
from flashmask_hf.hf.families import refuse_own_attention
from flashmask_hf.hf.mask_hook import NUMBERS, mask_hook
from flashmask_hf.hf.models import TOWERS, wrapper_of
from flashmask_hf.hf.rewrites import rewrite
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import FLASHMASK, HASH, NAMES, QK, VECTORS
from flashmask_hf.sparse.hf import hash_attention_forward, qk_attention_forward, warn_of_unread_options


def register() -> None:
    """Register every attention implementation of the package, and apply every patch.

    Raises:
        RuntimeError: this version of transformers is unknown, or a name is wrapped.
    """
    exclude_from_flash_attention(generic)
    leave_documents_to_hook(masking_utils)
    refuse_unsupported_models(PreTrainedModel)
    accept_sparse_options(PreTrainedConfig)
    check_calls(PreTrainedModel)
    read_kernel_names(PreTrainedConfig)
    functions = {FLASHMASK: attention_forward, HASH: hash_attention_forward, QK: qk_attention_forward}
    for name, function in functions.items():
        wrapper = wrapper_of(name, AttentionInterface())  # a new interface: what is registered
        if wrapper is not None:
            raise RuntimeError(
                f"{name!r} is registered in the wrapper {wrapper}, as with sp_size of accelerate, which register() "
                "would undo: ranks would attend within their shards. Call register() before."
            )
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask_hook)


def _refuse_version(does: str, where: str) -> NoReturn:
    raise RuntimeError(
        f"transformers {transformers.__version__} {does} in a way that flashmask_hf does not know ({where}); install a "
        "version it was tested with, pip install 'transformers>=5.17,<5.25', or a newer flashmask-hf"
    )


def _wrap_function(
    owner: Any, name: str, signatures: Sequence[Sequence[str]], wrapper: Callable[..., Any], does: str
) -> None:
    """Make a plain function with one of these signatures call `wrapper(original, *args, **kwargs)`.

    Otherwise the error says that this version `does` something in another way.
    """
    original = getattr(owner, name, None)
    if hasattr(original, "patched"):
        return
    if not isinstance(original, types.FunctionType) or [*inspect.signature(original).parameters] not in signatures:
        _refuse_version(does, f"{name} of {owner.__name__}")

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    patched.patched = True  # type: ignore[attr-defined]
    setattr(owner, name, patched)


# 1. The names are not FlashAttention's.


def exclude_from_flash_attention(module: Any) -> None:
    """Make `is_flash_attention_requested` answer False for this package's names, except in towers under "flashmask".

    Patched: `transformers.utils.generic.is_flash_attention_requested`, also in modules that imported it by name.

    Why: it looks for "flash" in the name. `from_pretrained` would load FlashAttention, and models pack padding away.
    """
    name = "is_flash_attention_requested"
    original = getattr(module, name, None)
    signature = ["config", "requested_attention_implementation", "version"]
    _wrap_function(module, name, [signature], _is_flash_attention, "looks for FlashAttention")
    for importer in [*sys.modules.values()]:
        if getattr(importer, "__dict__", {}).get(name) is original:
            setattr(importer, name, getattr(module, name))


def _is_flash_attention(
    original: Any, config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
) -> bool:
    requested = requested_attention_implementation
    name = requested if config is None else config._attn_implementation
    if name in NAMES and (config is None or requested is None):
        return name == FLASHMASK and version is None and type(config) in TOWERS
    return original(config, requested, version)


# 2. The mask hook finds packed documents, beside a cache or a 2D mask, too.

_MASK_ARGUMENTS = ["config", "inputs_embeds", "attention_mask", "position_ids", "layer_idx", "encoder_hidden_states"]
_CACHES = ("past_key_values", "cache")  # the name of the fourth argument until 5.23, and since


def leave_documents_to_hook(module: Any) -> None:
    """Make `_preprocess_mask_arguments` leave packed documents to the mask hook, which reads them from the model call.

    Patched: `transformers.masking_utils._preprocess_mask_arguments`. In a call it gets no positions. Without a call
    (models compiled in place, submodels run by hand), it returns document numbers as the 2D mask (`mask_hook.NUMBERS`).

    Why: transformers looks for documents only without cache and mask, and models default to `use_cache=True`. Where
    it finds them, it evaluates masks at `position_ids` instead of rows: Gemma 3 would look up the image blocks of the
    row's first document.
    """
    signatures = [[*_MASK_ARGUMENTS[:3], cache, *_MASK_ARGUMENTS[3:]] for cache in _CACHES]
    _wrap_function(module, "_preprocess_mask_arguments", signatures, _preprocess, "prepares masks")


def _preprocess(
    original: Any, config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    is_ours = config._attn_implementation in NAMES
    positions: Any = args[1] if len(args) > 1 else kwargs.get("position_ids")  # after the cache
    if is_ours and call_of(config, inputs_embeds.shape[1]) is not None:
        if len(args) > 1:
            args = (args[0], None, *args[2:])
        else:
            kwargs = kwargs | {"position_ids": None}
        return original(config, inputs_embeds, attention_mask, *args, **kwargs)
    found = original(config, inputs_embeds, attention_mask, *args, **kwargs)
    early_exit, mask, numbers, q_length, kv_length, q_offset, kv_offset = found
    if numbers is not None or (is_ours and positions is not None):
        record_documents()
    if not is_ours or positions is None or early_exit:
        return found
    if positions.dim() != 2 or positions.shape[-1] != q_length or (mask is not None and mask.dim() != 2):
        return found
    if isinstance(q_offset, Tensor) or not q_offset == kv_offset == 0 or q_length != kv_length:
        check_one_document(positions, mask, q_offset)
        return found
    real = None if mask is None else nn.functional.pad(mask, (0, q_length - mask.shape[1]))  # of any length
    numbers = of_positions(positions, real).numbers() if numbers is None else numbers
    mask = numbers = (numbers + 1).to(NUMBERS).expand(len(inputs_embeds), -1)
    if real is not None:  # which transformers counts padding before the first token of
        mask = torch.where(real, numbers, -numbers * (real.cumsum(-1) > 0))
    return early_exit, mask, None, q_length, kv_length, q_offset, kv_offset


# 3. Models that do not look attention up by name refuse the names.


def refuse_unsupported_models(model_class: Any) -> None:
    """Make models that do not look their attention up by name raise for this package's names.

    Patched: `PreTrainedModel.get_correct_attn_implementation`, which runs when a model's attention is set.

    Why: Falcon, GPT-J and a few more look the name up in a dict of their classes, and would fail with a KeyError or
    keep their classes. Others have one attention, which would silently add the mask hook's integers to its scores.
    Towers with their own attention that ask for no mask (timm) stay.
    """
    signature = ["self", "requested_attention", "is_init_check"]
    _wrap_function(model_class, "get_correct_attn_implementation", [signature], _choose_attention, "chooses attention")


def _choose_attention(original: Any, model: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
    if requested_attention in NAMES:
        members = vars(sys.modules[type(model).__module__])
        by_name = [x for name, x in members.items() if name.endswith("_ATTENTION_CLASSES") and isinstance(x, dict)]
        for classes in by_name:
            refuse = functools.partial(_refuse_attention_class, type(model).__name__, requested_attention)
            classes.setdefault(requested_attention, refuse)  # raises when the model makes its layers
            made = tuple(x for x in classes.values() if isinstance(x, type))
            if not is_init_check and any(isinstance(x, made) for x in model.modules()):
                refuse()  # the layers exist, and the model will not look in the dict again
        if not by_name and any(getattr(x, "__module__", "") == masking_utils.__name__ for x in members.values()):
            refuse_own_attention(type(model), requested_attention)
    return original(model, requested_attention, is_init_check)


def _refuse_attention_class(model: str, implementation: str, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{model} has attention classes of its own and does not take attn_implementation='{implementation}'; use "
        "attn_implementation='eager' for this model"
    )


# 4. `from_pretrained` takes the options of dynamic sparse attention.


def accept_sparse_options(config_class: type) -> None:
    """Let `from_pretrained` take the options of dynamic sparse attention as keywords, for every model.

    Patched: `PreTrainedConfig` gets the class attributes `flashmask_hash` and `flashmask_qk`, which are None.

    Why: `PreTrainedConfig.from_dict` takes only keywords that the config has as attributes.
    """
    for name in (HASH, QK):
        setattr(config_class, name, None)


# 5. Model calls are rewritten and checked.


def check_calls(model_class: Any) -> None:
    """Make each call of a model rewrite its arguments and check that documents stay apart.

    Patched: `PreTrainedModel.__call__`, inherited from `torch.nn.Module`, replaced by `run_call`.

    Why: an attention implementation does not see the model and its call.
    """
    _wrap_function(model_class, "__call__", [["self", "args", "kwargs"]], run_call, "calls models")


def run_call(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Rewrite and check a model call, run it by the model's unbound `__call__`, and check it again.

    Calls without this package's attention and mask indices run as they are.

    Raises:
        Exception: an error of `CHECKS`; or what the model raises.
    """
    config = model.config
    if getattr(config, HASH, None) is not None or getattr(config, QK, None) is not None:
        warn_of_unread_options(model)
    is_another = config._attn_implementation not in NAMES and kwargs.get(VECTORS) is None
    if is_another and not any(isinstance(x, FlashMask) for x in (*args, kwargs.get("attention_mask"))):
        return original(model, *args, **kwargs)
    calls = current_calls()
    call = rewrite(Call(model, args, kwargs, calls.call))
    run_checks(call)
    calls.call = call
    try:
        output = original(model, *call.args, **call.kwargs)
    finally:
        calls.call = call.outer
    run_checks(call, after=True)
    if call.outer is not None:
        call.outer.reads += call.reads
        if call.indices is not None:  # else its layers received no mask indices
            call.outer.supplied += call.supplied
    return output


# 6. A kernel of the Hub that holds this package is "flashmask".


class _AttentionName:
    """Storage of the name of a config's attention, read as fast as any attribute."""

    def __set__(self, config: Any, name: Any) -> None:
        if name is self:  # which a config reads before it has a name
            name = None
        is_ours = isinstance(name, str) and AttentionInterface._global_mapping.get(name) is attention_forward
        vars(config)[_NAME] = FLASHMASK if is_ours else name


_NAME = "_attn_implementation_internal"


def read_kernel_names(config_class: Any) -> None:
    """Make a config that names a Hub kernel of this package report its attention as "flashmask".

    Patched: `PreTrainedConfig._attn_implementation_internal`, where configs and models store it.

    Why: transformers registers a kernel "ORG/NAME" under that name, with the dense mask of "sdpa".
    """
    asked: Any = getattr(config_class, "_attn_implementation", None)
    if not isinstance(asked, property) or _NAME not in asked.fget.__code__.co_names:  # type: ignore[union-attr]
        _refuse_version("keeps the name of an attention", f"_attn_implementation of {config_class.__name__}")
    if not hasattr(config_class, _NAME):
        setattr(config_class, _NAME, _AttentionName())
