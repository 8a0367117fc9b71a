"""Inputs of other sizes than the examples: other batches, and lengths or images of one entry more and one less."""

from __future__ import annotations

import warnings
from typing import TypeAlias

import torch
from torch import Tensor, nn

from espalier.compact.copies import copied
from espalier.compact.examples import Call, OtherSizes
from espalier.compact.runs import run
from espalier.compact.walk import mapped, tensors_in

Sizes: TypeAlias = dict[tuple[int, int], int]  # (which tensor, dimension): its size

# forwards of the dense model that are spent on finding which sizes it takes
_TRIES = 20
# of these, left for all sizes at once: a model of many inputs may take no other size of any, but another batch
_AT_ONCE = 6
# entries of inputs that take no time to run on
_LITTLE = 2**15


def other_sizes(model: nn.Module, inputs: Call) -> list[OtherSizes]:
    """Inputs like these that the model takes: a batch of 3 (2 if they are large) with lengths and images of one more, a
    batch of 1 with one less, and if they are little, one of 4 or 2 with lengths of 1, and of twice the length and one.

    Which dimensions may vary is found by running the model. The first dimension of the first tensor is the batch, with
    the first ones of equal size. Other dimensions of equal size move together, or each by itself if the model does not
    take that. All are varied at once if the model takes that, else one after another.
    """
    taken = _Taken(model, inputs)
    tensors = _tensors(inputs)
    if not tensors:
        return []
    batch = [*sizes_of_batch(inputs, 0)]
    n = len(tensors[0])
    little = sum(x.numel() for x in tensors) <= _LITTLE
    more_of_them, even = (3 if little or n == 2 else 2), (4 if n < 4 else 2)
    one, large, evenly = (sizes_of_batch(inputs, m) if m != n else {} for m in (1, more_of_them, even))
    one = one if one and taken(one) else {}
    more, less, varying = list[Sizes](), list[Sizes](), Sizes()
    for size, dims in _alike(tensors, batch):
        split = [[at for at in dims if at[1] == d] for d in sorted({d for _, d in dims})]
        for some in (dims, *(split if len(split) > 1 else ())):
            if taken.left > _AT_ONCE and taken(one | dict.fromkeys(some, size + 1)):
                more.append(dict.fromkeys(some, size + 1))
                less += [dict.fromkeys(some, size - 1)] if size > 1 else []
                varying |= dict.fromkeys(some, size)
                if some is dims:
                    break
    found: list[Sizes] = []
    for first, steps in ((large, more), (one, less)):
        together = first | {at: n for step in steps for at, n in step.items()}
        if together and taken(together):
            found.append(together)
        elif steps:
            found += [x for x in (first, *(one | step for step in steps)) if x and taken(x)]
    far = ({at: 2 * size + 1 for at, size in varying.items()}, dict.fromkeys(varying, 1)) if varying else (Sizes(),)
    for sizes in (evenly | lengths for lengths in far):
        if sizes and sum(x.numel() for x in tensors_in(resized(inputs, sizes))) <= _LITTLE and taken(sizes):
            found.append(sizes)
    return [given for sizes in found if taken.here(given := OtherSizes(resized(inputs, sizes)))]


def sizes_of_batch(inputs: Call, n: int) -> Sizes:
    """Those of a batch of n: the first dimension of the first tensor, and of others that are as long."""
    tensors = _tensors(inputs)
    return {(i, 0): n for i, x in enumerate(tensors) if len(x) == len(tensors[0])}


def resized(inputs: Call, sizes: Sizes) -> Call:
    """The inputs cut to these sizes, or with entries repeated up to them."""
    order = {id(x): i for i, x in enumerate(_tensors(inputs))}

    def resize(given: Tensor) -> Tensor:
        x = given.detach()
        for dim, old in enumerate(given.shape):
            new = sizes.get((order.get(id(given), -1), dim), old)
            if new != old:
                x = x.index_select(dim, torch.arange(new, device=x.device) % old)
        return x

    return mapped(inputs, resize)


class _Taken:
    """Whether a model takes inputs of some sizes, found by running it a limited number of times."""

    def __init__(self, model: nn.Module, inputs: Call) -> None:
        # on a GPU, an index beyond a table of positions would end the process
        self._elsewhere = any(x.device.type != "cpu" for x in (*model.parameters(), *model.buffers()))
        self._model, self._on_cpu = model, copied(model).cpu() if self._elsewhere else model
        self._inputs, self.left = mapped(inputs, Tensor.cpu), _TRIES

    def __call__(self, sizes: Sizes) -> bool:
        self.left -= 1
        return self.left >= 0 and _runs(self._on_cpu, resized(self._inputs, sizes))

    def here(self, inputs: Call) -> bool:
        """Whether the model also takes on its device what it takes on the CPU."""
        return not self._elsewhere or _runs(self._model, inputs)


def _runs(model: nn.Module, inputs: Call) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(model, inputs, again=False)
    except Exception:
        return False
    return True


def _tensors(inputs: Call) -> list[Tensor]:
    """Those that have sizes, each once."""
    found = {id(x): x for x in tensors_in(inputs) if x.dim() and x.numel() and not x.is_nested}
    return list(found.values())


def _alike(tensors: list[Tensor], batch: list[tuple[int, int]]) -> list[tuple[int, list[tuple[int, int]]]]:
    """All dimensions but the batch by size, the largest first."""
    found: dict[int, list[tuple[int, int]]] = {}
    for i, x in enumerate(tensors):
        for d, size in enumerate(x.shape):
            if (i, d) not in batch:
                found.setdefault(size, []).append((i, d))
    return sorted(found.items(), reverse=True)
