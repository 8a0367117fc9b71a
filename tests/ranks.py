"""One of two ranks: tries Espalier on sharded models, and writes what came of it. `test_sharded.py` runs it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import espalier

LASSO = espalier.GroupLasso(0.1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def shards() -> nn.Module:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()


def plain_dtensors() -> None:
    """Without a penalty every entry steps alone, so shards do what the whole tensor does."""
    model, whole = shards(), network()
    for m in (model, whole):
        steps(m, espalier.RAMDA(m.named_parameters()))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(p.detach().full_tensor(), q.detach(), atol=1e-6)  # type: ignore[attr-defined]


def dtensors_that_skip() -> None:
    espalier.RAMDA(shards().named_parameters(), skip_nonfinite=True)


def dtensors_with_a_penalty() -> None:
    espalier.RAMDA([{"params": list(shards().named_parameters()), "penalty": espalier.L1(0.1)}])


def regularized_dtensors() -> None:
    espalier.regularize(shards(), LASSO)


def structure_of_dtensors() -> None:
    espalier.structure([{"params": [("w", shards()[0].weight)], "penalty": espalier.L1(0.1)}])  # type: ignore[index]


def regularized_after_fsdp(grouping: str) -> None:
    espalier.regularize(flat(network()), LASSO, grouping=grouping)


def built_after_fsdp(grouping: str) -> None:
    model = network()
    groups = espalier.regularize(model, LASSO, grouping=grouping)
    model = flat(model)
    steps(model, espalier.ProxSGD(groups))


def built_before_fsdp(grouping: str) -> None:
    model = network()
    optimizer = espalier.ProxSGD(espalier.regularize(model, LASSO, grouping=grouping))
    steps(flat(model), optimizer)


def elements_under_fsdp() -> None:
    regularized_after_fsdp("element")
    built_after_fsdp("element")
    built_before_fsdp("element")


def said(action: Callable[[], None]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "fine"


def main(rank: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone = (
        plain_dtensors, dtensors_that_skip, dtensors_with_a_penalty, regularized_dtensors, structure_of_dtensors,
        elements_under_fsdp,
    )  # fmt: skip
    found = {action.__name__: said(action) for action in alone}
    for action in (regularized_after_fsdp, built_after_fsdp, built_before_fsdp):
        for grouping in ("input", "output"):
            found[f"{action.__name__} {grouping}"] = said(lambda action=action, g=grouping: action(g))  # type: ignore[misc]
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
