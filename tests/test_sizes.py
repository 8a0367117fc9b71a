"""Models are compared on other sizes than the examples, where the dense model takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier
from espalier.compact.examples import as_given
from espalier.compact.sizes import other_sizes
from espalier.compact.walk import tensors_in

QUICK: dict[str, Any] = {"latency": False, "gather": "never", "low_rank": "never"}


class Text(nn.Module):
    """Positions up to 9, and a mask of length × length if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(20, 8), nn.Embedding(9, 8), nn.Linear(8, 2)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        h = F.scaled_dot_product_attention(h, h, h, mask)
        y: Tensor = self.head(h)
        return y


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 36) + 0.0


ids = torch.randint(20, (4, 6))
SIZES: dict[str, tuple[nn.Module, Any, list[list[tuple[int, ...]]]]] = {
    "images": (nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), [[(3, 3, 9, 9)], [(1, 3, 7, 7)], [(4, 3, 17, 17)]]),
    "wide images": (nn.Conv2d(3, 4, 3), torch.randn(1, 3, 6, 8), [[(3, 3, 7, 9)], [(1, 3, 5, 7)], [(4, 3, 13, 17)]]),
    "features": (nn.Linear(6, 2), torch.randn(3, 6), [[(1, 6)], [(4, 6)]]),
    "length as wide as the features": (
        nn.Linear(6, 2),
        torch.randn(2, 6, 6),
        [[(3, 7, 6)], [(1, 5, 6)], [(4, 13, 6)], [(4, 1, 6)]],
    ),
    "text": (Text(), ids, [[(3, 7)], [(1, 5)], [(2, 1)]]),
    "text and mask": (
        Text(),
        {"ids": ids, "mask": torch.ones(4, 6, 6) > 0},
        [[(3, 7), (3, 7, 7)], [(1, 5), (1, 5, 5)], [(2, 1), (2, 1, 1)]],
    ),
    "no longer text": (Text(), torch.randint(20, (3, 9)), [[(1, 9)], [(4, 9)]]),
    "one step": (
        nn.LSTM(6, 5, batch_first=True),
        torch.randn(2, 1, 6),
        [[(3, 2, 6)], [(1, 1, 6)], [(4, 3, 6)], [(4, 1, 6)]],
    ),
    "one size": (Fixed(), torch.randn(4, 36), []),
    "no tensors": (nn.Identity(), (3,), []),
}


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_that_a_model_takes(kind: str) -> None:
    model, inputs, expected = SIZES[kind]
    found = other_sizes(model, as_given(inputs))
    assert [[tuple(x.shape) for x in tensors_in(call)] for call in found] == expected
    for call in found:
        model(*call[0], **call[1])


def test_few_runs_find_them() -> None:
    count = 0

    class Many(nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            nonlocal count
            count += 1
            raise ValueError("not this")

    other_sizes(Many(), (tuple(torch.randn(2, *range(3, 3 + n)) for n in range(1, 9)), {}))
    assert count <= 20


def test_a_model_of_many_inputs_of_fixed_sizes_is_compared_on_other_batches() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(nn.Linear(n, 2) for n in range(3, 23))

        def forward(self, *args: Tensor) -> Any:
            return sum(tower(x) for tower, x in zip(self.towers, args, strict=True))

    found = other_sizes(Towers(), (tuple(torch.randn(2, n) for n in range(3, 23)), {}))
    assert [len(next(tensors_in(call))) for call in found] == [3, 1, 4]


class PadIfOdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.shape[-1] % 2:
            h = F.pad(h, (0, 1, 0, 1))
        y: Tensor = self.second(h)
        return y


class AloneIsSpecial(nn.Module):
    """A batch of one goes through a layer that reads all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.many = nn.Linear(3, 16), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.one if len(x) == 1 else self.many)(self.first(x))
        return y


def odd_images(n: int) -> Tensor:
    return torch.randn(2, 3, n, n)


class OneStepIsSpecial(AloneIsSpecial):
    """So does a sequence of one step, as in decoding."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.one if x.shape[1] == 1 else self.many)(self.first(x))
        return y


@pytest.mark.parametrize(
    ("model", "clear", "inputs", "sizes"),
    [
        (PadIfOdd(), lambda m: m.first.weight[:8].zero_(), odd_images, (8, 9, 7, 10)),
        (AloneIsSpecial(), lambda m: m.many.weight[:, :8].zero_(), lambda n: torch.randn(n, 3), (4, 1, 3)),
        (OneStepIsSpecial(), lambda m: m.many.weight[:, :8].zero_(), lambda n: torch.randn(2, n, 3), (5, 1, 2)),
    ],
    ids=["pad if odd", "a batch of one", "a length of one"],
)
def test_a_model_that_takes_another_way_at_another_size_stays_right(
    model: Any, clear: Callable[[Any], Any], inputs: Callable[[int], Tensor], sizes: tuple[int, ...]
) -> None:
    with torch.no_grad():
        clear(model)
    small = espalier.shrink(model, inputs(sizes[0]), **QUICK).model
    for n in sizes:
        x = inputs(n)
        torch.testing.assert_close(small(x), model(x))


def test_half_precision_fails_at_another_size_as_any_dtype_does() -> None:
    class Several(AloneIsSpecial):
        """A batch of more than three joins the channels with others, of the dense width."""

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y: Tensor = self.many(h if len(x) < 4 else h + torch.ones(16, dtype=x.dtype))
            return y

    model = Several().bfloat16()
    with torch.no_grad():
        model.many.weight[:, :8] = 0
    small = espalier.shrink(model, torch.randn(2, 3).bfloat16(), **QUICK).model
    assert small(torch.randn(4, 3).bfloat16()).shape == (4, 2)
