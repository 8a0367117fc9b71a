"""`espalier.shrink` on models that nobody wrote: tests/random_models.py makes them and judges what comes out."""

from __future__ import annotations

import pytest

from random_models import compact, judged, spec_of, summary

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
