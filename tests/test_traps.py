"""The numerical traps of the design, each where it would bite."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import espalier
from tables import OPTIMIZERS, OptimizerCase, names

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
DUAL_AVERAGING = tuple(c for c in OPTIMIZERS if c.build.anchored)


def conv_group(penalty: espalier.Penalty | None, *shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"params": [nn.Parameter(torch.randn(*shape, dtype=dtype))], "penalty": penalty}


@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(DUAL_AVERAGING))
def test_without_momentum_the_weights_are_z_to_the_bit(case: OptimizerCase) -> None:
    group = conv_group(espalier.GroupLasso(2.0), 8, 16, 3, 3)
    (w,) = group["params"]
    optimizer = case([group], momentum=0.0)
    for _ in range(10):
        w.grad = 0.1 * torch.randn_like(w)
        optimizer.step()
    report = espalier.structure(optimizer)
    assert report.layers[0].zero_groups > 0
    norms = w.detach().square().sum((0, 2, 3)).sqrt()
    assert torch.equal(norms == 0, norms < 1e-6)  # zeros are zeros, not 1e-17
    assert report.layers[0].zero_groups == int((norms == 0).sum())


@pytest.mark.parametrize("case", DUAL_AVERAGING, ids=names(DUAL_AVERAGING))
def test_with_momentum_only_the_structured_point_has_zeros(case: OptimizerCase) -> None:
    group = conv_group(espalier.GroupLasso(2.0), 8, 16, 3, 3)
    (w,) = group["params"]
    optimizer = case([group], momentum=0.9)
    for _ in range(30):
        w.grad = 0.1 * torch.randn_like(w)
        optimizer.step()
    assert espalier.structure(optimizer).group_sparsity == 0
    with optimizer.structured():
        assert espalier.structure(optimizer).group_sparsity > 0.5


@every_optimizer
@pytest.mark.parametrize("size", [1e-20, 1e-12, 1.0, 1e12])
def test_metrics_over_many_decades_stay_finite(case: OptimizerCase, size: float) -> None:
    """U starts at 0 and ε shrinks at every restart; gradients span ten decades within a group."""
    group = conv_group(espalier.GroupLasso(1e-4), 8, 4, 3, 3)
    (w,) = group["params"]
    settings = {"eps": 1e-12} if "eps" in case([nn.Parameter(torch.ones(1))]).defaults else {}
    optimizer = case([group], **settings)
    spread = torch.logspace(-5, 5, w.numel()).view_as(w) * size
    for step in range(12):
        w.grad = spread * torch.randn_like(w)
        optimizer.step()
        if step == 5:
            optimizer.restart()
    with optimizer.structured():
        assert w.isfinite().all()


@every_optimizer
def test_lr_zero_is_a_warm_up_like_any_other(case: OptimizerCase) -> None:
    group = conv_group(espalier.GroupLasso(1e-2), 8, 4, 3, 3)
    (w,) = group["params"]
    optimizer = case([group], lr=0.0)
    before = w.detach().clone()
    for _ in range(3):
        w.grad = torch.randn_like(w)
        optimizer.step()
    if not optimizer.anchored:
        assert torch.equal(w, before)
    assert torch.allclose(w, before, rtol=1e-6)  # (1 − c) w + c w rounds
    with optimizer.structured():
        assert torch.equal(w, before)
    optimizer.param_groups[0]["lr"] = case.settings["lr"]
    w.grad = torch.randn_like(w)
    optimizer.step()
    assert w.isfinite().all()
    assert not torch.allclose(w, before, rtol=1e-6)


@every_optimizer
@pytest.mark.parametrize(
    "penalty",
    [espalier.GroupLasso(1e6), espalier.SparseGroupLasso(1e6), espalier.L1(1e6), espalier.NuclearNorm(1e6)],
    ids=lambda p: type(p).__name__,
)
def test_every_group_screened(case: OptimizerCase, penalty: espalier.Penalty) -> None:
    group = conv_group(penalty, 8, 4, 3, 3)
    (w,) = group["params"]
    optimizer = case([group])
    for _ in range(3):
        w.grad = torch.randn_like(w)
        optimizer.step()
    with optimizer.structured():
        assert not w.any()


@every_optimizer
@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (1, 1), (1, 1, 1, 1), (3, 1, 3, 3), (4, 3, 1), (2, 3, 2, 2, 2)])
def test_shapes_at_the_edge(case: OptimizerCase, shape: tuple[int, ...]) -> None:
    for grouping in ("input", "output", "element"):
        group = conv_group(espalier.GroupLasso(1e-2), *shape)
        (w,) = group["params"]
        optimizer = case([{**group, "grouping": grouping}])
        for _ in range(5):
            w.grad = torch.randn_like(w)
            optimizer.step()
        assert w.isfinite().all()


@every_optimizer
def test_a_zero_gradient_from_the_start(case: OptimizerCase) -> None:
    """b = h W⁰ with the smallest metric there is: dead inputs go to zero, and nothing divides 0 by 0."""
    group = conv_group(espalier.GroupLasso(1e-2), 4, 3)
    (w,) = group["params"]
    start = w.detach().norm(dim=0)
    optimizer = case([group])
    for _ in range(200):
        w.grad = torch.zeros_like(w)
        optimizer.step()
    assert w.isfinite().all()
    with optimizer.structured():
        # a scalar metric shrinks by lr · λ a step and need not be there yet
        assert not w.any() or optimizer.scalar_metric
        assert (w.detach().norm(dim=0) < start).all()


@every_optimizer
@pytest.mark.parametrize("settings", [{}, {"skip_nonfinite": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("penalty", [None, espalier.GroupLasso(1e-2)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_written_into_half_precision_weights_counts(
    case: OptimizerCase, dtype: torch.dtype, penalty: espalier.Penalty | None, settings: dict[str, Any]
) -> None:
    """As in float32, to the bit: loading, clipping and masks reach the float32 master, and only what they touched."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype))
    q = nn.Parameter(p.detach().float())
    optimizers = [case([{"params": [w], "penalty": penalty}], **settings) for w in (p, q)]

    def step() -> None:
        p.grad = torch.randn(6, 4, generator=generator).to(dtype)
        q.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(optimizers[0].state[p]["master"], q)
        assert torch.equal(p, q.to(dtype))

    def write(value: float) -> None:
        with torch.no_grad():
            for w in (p, q):
                w[2:4] = value

    step()
    write(3.0)
    step()
    for optimizer in optimizers:
        write(-2.0)
        optimizer.restart()
    step()
    write(1.0)
    if settings.get("skip_nonfinite"):
        p.grad = torch.full_like(p, torch.nan)
        optimizers[0].step()
        assert (p[2:4] == 1).all()
    step()


@every_optimizer
# beyond half of the largest number g − m overflows, here as in AdamW, unless the signs agree
@pytest.mark.parametrize(("size", "signs"), [(1e20, True), (1.7e38, True), (3e38, False)])
@pytest.mark.parametrize(
    "penalty",
    [
        None,
        espalier.GroupLasso(1e-3),
        espalier.SparseGroupLasso(1e-3),
        espalier.GroupMCP(1e-3),
        espalier.L1(1e-3),
        espalier.NuclearNorm(1e-3),
    ],
    ids=lambda p: type(p).__name__,
)
def test_squares_that_overflow_make_no_nan(
    case: OptimizerCase, penalty: espalier.Penalty | None, size: float, signs: bool
) -> None:
    group = conv_group(penalty, 6, 5)
    (w,) = group["params"]
    optimizer = case([group], skip_nonfinite=True)
    for _ in range(3):
        w.grad = size * (torch.randn_like(w).sign() if signs else torch.ones_like(w))
        optimizer.step()
        assert w.isfinite().all()
        with optimizer.structured():
            assert w.isfinite().all()
    assert all(x.isfinite().all() for x in optimizer.state[w].values())


class _Memory(TorchDispatchMode):
    """The peak of bytes that live in storages made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out


@every_optimizer
def test_a_step_needs_at_most_three_copies_of_the_largest_tensor(case: OptimizerCase) -> None:
    group = conv_group(espalier.GroupLasso(1e-2), 512, 512, 3, 3)  # VGG19's
    (w,) = group["params"]
    optimizer = case([group])
    w.grad = torch.randn_like(w)
    optimizer.step()
    with _Memory() as memory:
        optimizer.step()
    assert 0 < memory.peak <= 3 * w.numel() * w.element_size()
