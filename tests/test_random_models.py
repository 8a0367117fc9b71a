"""`espalier.shrink` on models that nobody wrote: tests/random_models.py makes them and judges what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import espalier
from random_models import Spec, compact, judged, spec_of, summary

# of models with consistent zeros, and of the entries that these allow to remove: refusing everything must not pass.
# In 500 models it is 0.85 and 0.6; twenty are few
LEAST_SMALLER, LEAST_REMOVED = 0.6, 0.3


@pytest.mark.parametrize("first", [0, 20, 40])
def test_random_models_shrink_to_what_computes_the_same(first: int) -> None:
    verdicts = [judged(spec_of(seed)) for seed in range(first, first + 20)]
    wrong = [f"{compact(v.spec)}\n  {f.kind}: {f.detail}" for v in verdicts for f in v.failures]
    assert not wrong, "\n".join([summary(verdicts), *wrong])
    assert sum(not v.done for v in verdicts) <= 2, summary(verdicts)
    zeroed = [v for v in verdicts if v.possible]
    assert sum(v.after < v.before for v in zeroed) >= LEAST_SMALLER * len(zeroed), summary(verdicts)
    gone = sum(min(v.before - v.after, v.possible) for v in zeroed)
    assert gone >= LEAST_REMOVED * sum(v.possible for v in zeroed), summary(verdicts)


def _wrong(model: Any, shrunk: Any) -> None:
    with torch.no_grad():
        next(shrunk.model.parameters()).mul_(1.001)


def _fails(model: Any, shrunk: Any) -> None:
    raise IndexError("list index out of range")


def _touches(model: Any, shrunk: Any) -> None:
    model.steps[0].seen = 1


def _draws(model: Any, shrunk: Any) -> None:
    torch.rand(1)


def _keeps(model: Any, shrunk: Any) -> None:
    shrunk.model.steps[0].cache = torch.ones(2)


FAULTS = {"wrong on": _wrong, "bare exception": _fails, "the dense model was changed": _touches,
          "random state": _draws, "state of the examples": _keeps}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_the_judge_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    shrink: Callable[..., Any] = espalier.shrink

    def faulty(model: Any, inputs: Any, **options: Any) -> Any:
        shrunk = shrink(model, inputs, **options)
        FAULTS[kind](model, shrunk)
        return shrunk

    spec = Spec(seed=0, domain="flat", width=4, blocks=(("mlp", 1),))
    assert not judged(spec).failures
    monkeypatch.setattr(espalier, "shrink", faulty)
    assert any(f.kind.startswith(kind) for f in judged(spec).failures)
