"""Store of tensors between forward and backward: on the host within a budget, else on their device.

Blocks of pinned host memory are kept from step to step: PyTorch's pinned allocator would round each tensor up to a
power of two. On a CPU the same code copies within ordinary memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from flashmask_hf._numbers import as_integer
from flashmask_hf.kernels.launch.tensor_layout import layout_of

if TYPE_CHECKING:
    Event = torch.cuda.Event | torch.Event

BLOCK_BYTES = 16 * 2**20
"""Size of a block, a power of two."""


class Block:
    """Host memory, and the event after which it may be written again."""

    def __init__(self) -> None:
        self.memory = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
        self.done: Event | None = None


class Store:
    """Store of tensors between forward and backward, with blocks of host memory within a budget.

    Only `give` may run in a finalizer.

    Args:
        host_bytes: the budget, in whole blocks; None for no limit.
        min_bytes: tensors that together take fewer bytes stay.

    Attributes:
        peak_bytes: the largest value of `held_bytes` so far.
        seen_bytes: bytes of the last forward's tensors of at least `min_bytes`, wherever they are.
    """

    def __init__(self, host_bytes: int | None, min_bytes: int) -> None:
        self.peak_bytes = self.seen_bytes = 0
        self.min_bytes = min_bytes
        self._excluded: set[int] = set()
        self._known: weakref.WeakValueDictionary[tuple, Saved] = weakref.WeakValueDictionary()
        self._copying = self.first = _nothing  # the latest copy to the host, the last layer's first tensors
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._free: list[Block] = []
        self._count = 0  # of blocks in use or free
        self._open = True
        self.host_bytes = host_bytes

    @property
    def host_bytes(self) -> int | None:
        """Limit of host memory in bytes, or None; may be set between steps."""
        return self._host_bytes

    @host_bytes.setter
    def host_bytes(self, value: int | None) -> None:
        self._finish_copies()
        self._host_bytes = None if value is None else as_integer("host_bytes", value, 0, why="None is no limit")
        self._refused = False
        self.trim()

    @property
    def pool_bytes(self) -> int:
        """Bytes of host memory taken, in use or kept for the next step."""
        return self._count * BLOCK_BYTES

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that contain tensors now, in whole blocks."""
        return (self._count - len(self._free)) * BLOCK_BYTES

    def take(self, count: int) -> list[Block] | None:
        """Return blocks, or None beyond the budget or the system's memory."""
        missing = count - len(self._free)
        if not self._open or (missing > 0 and not self._grow(missing)):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return blocks

    def _grow(self, count: int) -> bool:
        over = self._host_bytes is not None and self.pool_bytes + count * BLOCK_BYTES > self._host_bytes
        if over or self._refused:
            return False
        for _ in range(count):
            try:
                block = Block()
            except RuntimeError as error:
                self._refused = True  # asking again is slow, and fails
                got = f"the system gives no more than {self.pool_bytes / 2**30:.2f} GiB of pinned host memory ({error})"
                warnings.warn(f"{got}; other checkpoints stay on the GPU. Set a smaller host_bytes", stacklevel=2)
                return False
            self._count += 1
            self._free.append(block)
        return True

    def give(self, blocks: list[Block]) -> None:
        """Return blocks, which may be read or written until their event."""
        if self._open:
            self._free.extend(blocks)
        else:
            self._count -= len(blocks)

    def trim(self) -> None:
        """Free unused blocks beyond the budget of host memory."""
        if self._host_bytes is not None:
            self._drop(self._count - self._host_bytes // BLOCK_BYTES)

    def _drop(self, count: int) -> None:
        count = min(count, len(self._free))
        if count > 0:
            del self._free[-count:]
            self._count -= count
            _empty_host_cache()

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of a GPU's copies."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _finish_copies(self) -> None:
        """Wait for all copies: PyTorch does not free memory that they may use."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Free all unused blocks; later calls of `take` return None, and saved tensors keep theirs until they die."""
        self._finish_copies()
        self._open = False
        self._drop(len(self._free))

    def begin_forward(self, excluded: Iterable[Tensor]) -> None:
        """Start a forward. Tensors that share memory with `excluded` stay on their device."""
        self.seen_bytes = 0
        self._excluded = {_address(x) for x in excluded if type(x) in (Tensor, nn.Parameter)}
        self.trim()

    @contextlib.contextmanager
    def layer(self) -> Iterator[None]:
        """Open a layer, which is `current_layer` inside, and saves what autograd saves there."""
        layer = Layer(self)
        token = current_layer.set(layer)
        try:
            with torch.autograd.graph.saved_tensors_hooks(layer.save, lambda saved: saved.load()[0]):
                yield
        finally:
            current_layer.reset(token)

    def save(self, tensors: tuple[Tensor, ...], layer: Layer) -> Saved:
        """Save tensors of one device, and start their copy to the host if the budget allows.

        Only dense floating-point tensors are moved. Tensors of equal memory, layout and version share an entry.
        """
        tensors = tuple(x.detach() for x in tensors)
        if not all(self._is_movable(x) for x in tensors):
            return Saved(tensors)
        size = sum(x.nbytes for x in tensors)
        if size < self.min_bytes:
            return Saved(tensors)
        key = tuple((_address(x), x.storage_offset(), x.shape, x.stride(), x.dtype, x._version) for x in tensors)
        saved = self._known.get(key)
        if saved is None:
            self.seen_bytes += size
            saved = self._known[key] = Saved(tensors)
            layer.append(saved)
            copying, self._copying = self._copying(), _nothing
            if copying is not None:
                copying.release()  # one copy at a time holds GPU memory
            blocks = self.take(math.ceil(size / BLOCK_BYTES))
            if blocks is not None:
                saved.move(blocks, self)
                self._copying = weakref.ref(saved)
        return saved

    def _is_movable(self, x: Tensor) -> bool:
        return (
            type(x) is Tensor
            and x.device.type in ("cuda", "cpu")
            and x.is_floating_point()
            and x.numel() > 0
            and torch.empty_like(x, device="meta").stride() == x.stride()  # dense, in any order of dimensions
            and _address(x) not in self._excluded
        )


def _nothing() -> Saved | None:
    """Refer to nothing, as a dead reference does."""
    return None


class Layer:
    """A checkpointed layer, whose saved tensors are linked in the order of the backward."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._before = self._last = _nothing  # the first tensors of the layer before, and the last of this one

    def save(self, *tensors: Tensor) -> Saved:
        """Save tensors of one device together."""
        return self._store.save(tensors, self)

    def append(self, saved: Saved) -> None:
        """Link to the backward's order: last layer first, each from its first tensors."""
        if self._last is _nothing:
            self._before, self._store.first = self._store.first, weakref.ref(saved)
        last, self._last = self._last(), weakref.ref(saved)
        if last is not None:
            last.following = self._last
        saved.following = self._before


current_layer: contextvars.ContextVar[Layer | None] = contextvars.ContextVar("current_layer", default=None)
"""The layer being checkpointed, if it goes to a store."""


class Saved:
    """Tensors in a store. Their host memory returns to the pool when the autograd graph dies."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.following = _nothing  # what the backward reads next
        self._tensors: tuple[Tensor, ...] | None = tensors  # on the device; None if on the host only
        self._versions = [x._version for x in tensors]
        self._blocks: list[Block] = []

    def move(self, blocks: list[Block], store: Store) -> None:
        """Start the copy into blocks of host memory; `release` then frees the tensors on the device."""
        assert self._tensors is not None
        device = self._tensors[0].device
        self._blocks, self._pool = blocks, store
        # References keep other storages from these addresses, which identify tensors.
        self._storages = [StorageWeakRef(x.untyped_storage()) for x in self._tensors]
        self._layouts = [layout_of(x) for x in self._tensors]
        self._copies = self._compute = None
        if device.type == "cuda":
            # Autograd runs the layer's backward on this stream, too.
            self._copies, self._compute = store.stream(device), torch.cuda.current_stream(device)
        self._copy(to_host=True)

    def load(self) -> tuple[Tensor, ...]:
        """Return the tensors on their device, and start the copy that the backward reads next."""
        self.fetch()
        following = self.following()
        if following is not None:
            following.fetch()
        tensors = self._tensors
        assert tensors is not None
        if self._are_changed():
            problem = "a checkpointed layer's input or attention result was modified by an inplace operation"
            raise RuntimeError(f"{problem} after it was saved; use an operation that makes a new tensor")
        if self._blocks:
            self.release()
        return tuple(x.detach() for x in tensors)

    def fetch(self) -> None:
        """Start the copy back to the device, if the tensors are only on the host."""
        if self._tensors is None:
            with torch.cuda.stream(self._compute):  # its order then decides when the memory is free
                self._tensors = tuple(layout.allocator()() for layout in self._layouts)
            self._copy(to_host=False)
            self._versions = [x._version for x in self._tensors]

    def release(self) -> None:
        """Free unchanged tensors on the device, after the copy."""
        if self._tensors is not None and not self._are_changed():
            self._wait()
            self._tensors = None

    def _are_changed(self) -> bool:
        return self._tensors is not None and [x._version for x in self._tensors] != self._versions

    def _copy(self, to_host: bool) -> None:
        assert self._tensors is not None
        if self._copies is not None and self._compute is not None:
            self._copies.wait_stream(self._compute)  # it may still write the source or read the target
            # Blocks may come from another GPU, whose copies are on another stream.
            for event in {block.done for block in self._blocks if block.done is not None}:
                self._copies.wait_event(event)
        with torch.cuda.stream(self._copies):
            for there, here in _pair_up(self._tensors, self._blocks):
                target, source = (here, there) if to_host else (there, here)
                target.copy_(source, non_blocking=True)
        done = None if self._copies is None else self._copies.record_event()
        for block in self._blocks:
            block.done = done

    def _wait(self) -> None:
        done = self._blocks[0].done
        if self._compute is not None and done is not None:
            self._compute.wait_event(done)

    def __del__(self) -> None:
        if self._blocks:
            if self._tensors is not None:
                self._wait()
            self._pool.give(self._blocks)


def _empty_host_cache() -> None:
    """Return PyTorch's cached pinned memory to the system."""
    if torch.cuda.is_available():
        empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache  # torch 2.11
        empty()


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _pair_up(tensors: Iterable[Tensor], blocks: list[Block]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the bytes of dense tensors, piece by piece, each with its place in the blocks."""
    position = 0
    for x in tensors:
        rest = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
        while len(rest):
            number, start = divmod(position, BLOCK_BYTES)
            size = min(len(rest), BLOCK_BYTES - start)
            yield rest[:size], blocks[number].memory[start : start + size]
            rest = rest[size:]
            position += size
