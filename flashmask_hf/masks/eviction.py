"""Masks of evicted keys: a key-value cache that drops keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf._numbers import as_integer, as_length, check_tensor
from flashmask_hf.mask import FlashMask
from flashmask_hf.masks._arguments import Device, from_array
from flashmask_hf.masks._columns import key_positions, make_mask


def random_eviction(
    kv_len: int,
    *,
    evict_from: Tensor | None = None,
    generator: torch.Generator | None = None,
    batch: int = 1,
    heads: int = 1,
    q_len: int | None = None,
    device: Device = None,
) -> FlashMask:
    """Causal, with each key dropped from some later row on, as a key-value cache evicts (section 2.1).

    Evicted from the query rows 4, 2, 5, 4 and 5, of 5 keys:

        1 . . . .
        1 1 . . .
        1 . 1 . .
        1 . 1 1 .
        . . 1 . 1

    Args:
        evict_from: int tensor or array [B, Hm, kv_len]: the first position that no longer sees key j, in j+1..kv_len;
            kv_len is never. The host reads it. None draws it uniformly.
        generator: draws on its own device, where the mask stays. None is torch's CPU default.
        batch: batch entries to draw for.
        heads: mask heads to draw for.

    Returns:
        FlashMask: indices [B, Hm, kv_len, 1], causal.

    Raises:
        TypeError: `evict_from` is not an integer tensor, or `generator` is not a torch.Generator.
        ValueError: `evict_from` has another shape or a value outside j+1..kv_len, or comes with a generator, batch or
            heads.

    Example:
        >>> random_eviction(5, evict_from=torch.tensor([[[4, 2, 5, 4, 5]]])).indices.flatten()
        tensor([4, 2, 5, 4, 5], dtype=torch.int32)
    """
    kv_len = as_length("kv_len", kv_len)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if evict_from is None:
        shape = (as_integer("batch", batch, 1), as_integer("heads", heads, 1), kv_len)
        place = torch.device("cpu") if generator is None else generator.device
        options: dict[str, Any] = {"device": place, "dtype": torch.float64}
        if generator is not None:  # with None, torch takes no symbolic shape
            options["generator"] = generator
        share = torch.rand(shape, **options)
        key = key_positions(kv_len, place)
        evict_from = key + 1 + (share * (kv_len - key)).long()
        return make_mask(evict_from, causal=True, q_len=q_len, device=device)
    if generator is not None or (batch, heads) != (1, 1):
        raise ValueError("evict_from leaves nothing to draw; leave out generator, batch and heads, or evict_from")
    shape = f"[B, Hm, kv_len = {kv_len}]"
    places = check_tensor("evict_from", from_array(evict_from), "an integer", shape)
    if places.shape[-1] != kv_len:
        raise ValueError(f"evict_from must have shape {shape}, got {list(places.shape)}")
    bad = (places <= key_positions(kv_len, places.device)) | (places > kv_len)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"evict_from{where} is {int(places[tuple(where)])}, but key {where[2]} can be evicted from a position "
            f"in {where[2] + 1}..{kv_len} only ({kv_len} = never)"
        )
    return make_mask(places.long(), causal=True, q_len=q_len, device=device)
