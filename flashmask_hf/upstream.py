"""What transformers must do differently for this backend.

It must tell the backend's name from FlashAttention's, find packed documents beside caches and masks, say so where a
model does not take the backend, and take the options of dynamic sparse attention for the config's. Other attention
implementations get what they got before. `adapt` refuses a version whose code is not as expected.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.utils import generic

from flashmask_hf.mask_compiler import NAME, refuse_own_code
from flashmask_hf.mask_reader import document_starts
from flashmask_hf.ops import device_assert

if TYPE_CHECKING:
    from transformers.utils.generic import is_flash_attention_requested

__all__ = ["HASH", "NAMES", "QK", "adapt"]

HASH = "flashmask_hash"
"""What `attn_implementation` is set to for hash-sparse attention, and the config attribute with its options."""

QK = "flashmask_qk"
"""The same for dropped queries and keys."""

NAMES = (NAME, HASH, QK)
"""Every `attn_implementation` of this package."""


def adapt() -> None:
    """Adapt the installed transformers; doing it again changes nothing.

    Raises:
        RuntimeError: this version is not one that the package knows how to adapt.
    """
    tell_apart_from_flash_attention(generic)
    find_documents_always(masking_utils)
    refuse_where_unfit(PreTrainedModel)
    take_options(PreTrainedConfig)


def _refuse(does: str, where: str) -> NoReturn:
    raise RuntimeError(
        f"transformers {transformers.__version__} {does} in a way that flashmask_hf does not know ({where}); install a "
        "version it was tested with, pip install 'transformers>=5.17,<5.24', or a newer flashmask-hf"
    )


def _asks_for_flash_attention(config=None, requested_attention_implementation=None, version=None):
    """Stands in for `is_flash_attention_requested`: its code runs under that name, in that function's module."""
    name = requested_attention_implementation if config is None else config._attn_implementation
    ours = ("flashmask", "flashmask_hash", "flashmask_qk")
    if name in ours and (config is None or requested_attention_implementation is None):
        return False
    return is_flash_attention_requested.without_flashmask(config, requested_attention_implementation, version)  # pyright: ignore[reportFunctionMemberAccess]


def tell_apart_from_flash_attention(module: Any) -> None:
    """Make `is_flash_attention_requested` of `module` answer False for exactly this package's names.

    It looks for "flash" in the name (`transformers/utils/generic.py`), and dozens of modules have imported it by name,
    so its code is replaced in place. All other names get the answer they got before.

    Raises:
        RuntimeError: the function is missing or not what is expected.
    """
    function: Any = getattr(module, "is_flash_attention_requested", None)
    parameters = ["config", "requested_attention_implementation", "version"]
    known = (
        isinstance(function, types.FunctionType)
        and list(inspect.signature(function).parameters) == parameters
        and function.__defaults__ == (None, None, None)
        and not function.__closure__
        and function.__globals__.get("is_flash_attention_requested") is function
    )
    if known:
        names = ("flash_attention_2", "sdpa", *NAMES)
        answers = [function(requested_attention_implementation=name) for name in names]
        if answers == [True] + [False] * (len(NAMES) + 1):
            return  # told apart already
        known = answers == [True, False] + [True] * len(NAMES)
    if not known:
        _refuse("looks for FlashAttention", f"is_flash_attention_requested in {module.__name__}")
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    function.without_flashmask = original
    function.__code__ = _asks_for_flash_attention.__code__


_FOUND_HERE = torch.int32  # tells the documents that are found here from those of transformers, which are int64
_MASK_ARGUMENTS = [
    "config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids", "layer_idx",
    "encoder_hidden_states",
]  # fmt: skip


def find_documents_always(module: Any) -> None:
    """Make `_preprocess_mask_arguments` of `module` find packed documents beside a cache or a 2D mask, too.

    It looks for them in `position_ids` only if there is neither (`transformers/masking_utils.py`), so that others mix
    packed documents as soon as `use_cache=True`, which is the default of a model in evaluation.

    Raises:
        RuntimeError: the function is missing or not what is expected.
    """
    original = getattr(module, "_preprocess_mask_arguments", None)
    if hasattr(original, "finds_documents"):
        return
    if not isinstance(original, types.FunctionType) or list(inspect.signature(original).parameters) != _MASK_ARGUMENTS:
        _refuse("prepares masks", f"_preprocess_mask_arguments in {module.__name__}")

    @functools.wraps(original)
    def prepare(
        config: Any,
        inputs_embeds: Tensor,
        attention_mask: Any,
        past_key_values: Any,
        position_ids: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        found = original(config, inputs_embeds, attention_mask, past_key_values, position_ids, *rest, **more)
        if config._attn_implementation not in NAMES or position_ids is None:
            return found
        early, mask, documents, q_length, *place = found
        if early or documents is not None or q_length == 1 or (mask is not None and mask.dim() != 2):
            return found
        return (
            early,
            mask,
            _documents(config, mask, position_ids, inputs_embeds.shape[0], q_length, *place),
            q_length,
            *place,
        )

    prepare.finds_documents = True  # type: ignore[attr-defined]
    module._preprocess_mask_arguments = prepare
    combine = getattr(module, "packed_sequence_compatibility_function", None)
    if combine is None:  # before transformers 5.20
        return

    @functools.wraps(combine)
    def keep_rows(mask_function: Any, position_ids: Tensor, packed_sequence_mask: Tensor) -> Any:
        if packed_sequence_mask.dtype != _FOUND_HERE:
            return combine(mask_function, position_ids, packed_sequence_mask)
        return module.and_masks(mask_function, module.packed_sequence_mask_function(packed_sequence_mask))

    module.packed_sequence_compatibility_function = keep_rows


def _documents(
    config: Any,
    mask: Tensor | None,
    position_ids: Tensor,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
) -> Tensor | None:
    """The number of the document that each token is in, int32 [B, S], where the row is whole; else None.

    A document starts where `document_starts` says, if no padding is there. Windows within it are counted in rows, as
    they are with a cache or a 2D mask and one document: positions of padding mean nothing.

    Raises:
        RuntimeError: a row of several documents where they cannot be kept apart (a device-side check): a part of a row,
            a static cache, and chunked attention.
    """
    if position_ids.dim() != 2 or position_ids.shape[-1] != q_length:
        return None
    starts = document_starts(position_ids).expand(batch_size, -1)
    if mask is not None:  # its columns are those of all keys, of a static cache also before they are there
        column = torch.arange(q_length, device=mask.device) + q_offset
        starts = starts & torch.nn.functional.pad(mask, (0, 1))[:, column.clamp(max=mask.shape[-1])]
    whole = not isinstance(q_offset, Tensor) and q_offset == kv_offset == 0 and q_length == kv_length
    if whole and getattr(config, "attention_chunk_size", None) is None:
        return starts.cumsum(-1).to(_FOUND_HERE)
    device_assert(
        (starts.sum(-1) <= 1).all(),
        "position_ids start again at 0 in one row, but packed documents are not kept apart in a static cache, in a "
        "part of a row, or, with chunked attention, beside any cache or 2D mask; pass whole rows and use_cache=False",
    )
    return None


def refuse_where_unfit(model_class: Any) -> None:
    """Make models that do not ask for attention by name say that they do not take this backend.

    Falcon, GPT-J and a few more look `config._attn_implementation` up in a dict of classes of their module. Others have
    one attention, to which they give whatever mask they get by that name. `get_correct_attn_implementation` of
    `model_class` (`transformers/modeling_utils.py`) runs before either, for the models within models, too. A tower that
    has attention of its own and no mask of transformers (of timm, say) goes on as it is.

    Raises:
        RuntimeError: the method is missing or not what is expected.
    """
    original = getattr(model_class, "get_correct_attn_implementation", None)
    if hasattr(original, "refuses"):
        return
    expected = ["self", "requested_attention", "is_init_check"]
    if not isinstance(original, types.FunctionType) or list(inspect.signature(original).parameters) != expected:
        _refuse("chooses attention", f"get_correct_attn_implementation of {model_class.__name__}")

    @functools.wraps(original)
    def choose(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention in NAMES:
            names = vars(sys.modules[type(self).__module__])
            by_name = [x for name, x in names.items() if name.endswith("_ATTENTION_CLASSES") and isinstance(x, dict)]
            for classes in by_name:
                refusal = functools.partial(_no_class, type(self).__name__, requested_attention)
                classes.setdefault(requested_attention, refusal)
                made = tuple(x for x in classes.values() if isinstance(x, type))
                if not is_init_check and any(isinstance(x, made) for x in self.modules()):
                    refusal()  # its layers will not look there again
            if not by_name and any(getattr(x, "__module__", "") == masking_utils.__name__ for x in names.values()):
                refuse_own_code(type(self), requested_attention)
        return original(self, requested_attention, is_init_check)

    choose.refuses = True  # type: ignore[attr-defined]
    model_class.get_correct_attn_implementation = choose


def _no_class(model: str, implementation: str, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{model} has attention classes of its own and does not take attn_implementation='{implementation}'; use "
        "attn_implementation='eager' for this model"
    )


def take_options(config_class: type) -> None:
    """Let `from_pretrained` take the options of dynamic sparse attention as keywords, for any model.

    `PreTrainedConfig.from_dict` takes a keyword for the config's if the config has that attribute already, and leaves
    it to the model's class if not. None is not saved.
    """
    for name in (HASH, QK):
        if not hasattr(config_class, name):
            setattr(config_class, name, None)
