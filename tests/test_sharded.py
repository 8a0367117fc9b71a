"""Weights of which a rank holds only a part: what steps them entry by entry works, all else is refused at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import espalier
from tables import OPTIMIZERS, OptimizerCase, names

RANKS = Path(__file__).parent / "ranks.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = [str(folder / "store"), str(folder / "found.json")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(RANKS), str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert (folder / "found.json").exists(), said
    result: dict[str, str] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_sharded_weights_are_refused_by_name_or_stepped_entry_by_entry(found: dict[str, str]) -> None:
    for what in ("plain_dtensors", "elements_under_fsdp"):
        assert found.pop(what) == "fine", what
    for what in ("dtensors_that_skip", "dtensors_with_a_penalty", "regularized_dtensors"):
        said = found.pop(what)
        assert said.startswith("0.weight is a DTensor (FSDP2"), (what, said)
        assert "\n" not in said
    assert found.pop("structure_of_dtensors").startswith("w is a DTensor")
    assert len(found) == 6
    for what, said in found.items():
        assert "0.weight has shape (15,)" in said, (what, said)
        assert "FSDP1 and DeepSpeed ZeRO" in said, (what, said)
        assert "DistributedDataParallel" in said, (what, said)


@pytest.mark.parametrize("grouping", ["input", "output", "element"])
@pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
def test_weights_flattened_after_the_optimizer_was_built_are_refused(case: OptimizerCase, grouping: str) -> None:
    """DeepSpeed ZeRO puts one flat tensor in the place of a group's weights; FSDP1 flattens the weights themselves."""
    for taken_apart in (False, True):
        for stepped in (False, True):
            model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
            optimizer = case(espalier.regularize(model, espalier.GroupLasso(1e-2), grouping=grouping))
            if stepped:
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            group = optimizer.param_groups[0]
            if taken_apart:
                group["params"][0].data = group["params"][0].data.flatten()[:7].clone()
            else:
                group["params"] = [nn.Parameter(torch.cat([p.detach().flatten() for p in group["params"]]))]
            group["params"][0].grad = torch.ones_like(group["params"][0])
            if grouping != "element":
                with pytest.raises(ValueError, match=r"has shape \((7|18),\).*FSDP1 and DeepSpeed ZeRO.*Use Distr"):
                    optimizer.step()
            elif not (taken_apart and stepped):
                optimizer.step()


@pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
def test_a_whole_weight_may_take_the_place_of_another(case: OptimizerCase) -> None:
    optimizer = case([{"params": [nn.Parameter(torch.ones(3, 4))], "penalty": espalier.GroupLasso(1e-2)}])
    other = nn.Parameter(torch.ones(3, 4))
    other.grad = torch.ones_like(other)
    optimizer.param_groups[0]["params"] = [other]
    optimizer.step()
    assert not torch.equal(other, torch.ones(3, 4))
