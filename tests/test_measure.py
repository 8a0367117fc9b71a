"""How structured the weights are: against examples counted by hand."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier import L1, GroupLasso, Heads, Input, Layout, NuclearNorm, StructureMonitor, regularize, structure
from espalier.monitor import Change
from tables import OPTIMIZERS, OptimizerCase, names

LASSO = GroupLasso(0.1)


def by_hand(*tensors: Tensor, penalty: espalier.Penalty = LASSO, **more: Any) -> list[dict[str, Any]]:
    return [{"params": list(tensors), "penalty": penalty, **more}]


def sparse_model() -> nn.Sequential:
    """A small layer with 1 of its 4 inputs at zero, a large one with 3 of 6, and one single zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 2, 1), nn.Conv2d(6, 10, 3))
    with torch.no_grad():
        model[0].weight[:, 2] = 0.0
        model[1].weight[:, [0, 3, 5]] = 0.0
        model[1].weight[4, 1, 1, 1] = 0.0
        model[0].bias.zero_()
    return model


# ------------------------------------------------------------------------------------------------- the measures


def test_group_measures_of_an_example() -> None:
    report = structure(regularize(sparse_model(), LASSO))
    small, large = 4 * 2, 6 * 10 * 9
    assert [(x.name, x.shape, x.groups, x.zero_groups, x.zero_elements) for x in report.layers] == [
        ("0.weight", (2, 4, 1, 1), 4, 1, 2),
        ("1.weight", (10, 6, 3, 3), 6, 3, 3 * 90 + 1),
    ]
    # the bias that is all zero carries no penalty, and does not count
    assert report.weighted_group_sparsity == pytest.approx((2 + 270) / (small + large))
    assert report.group_sparsity == pytest.approx(4 / 10)
    assert report.element_sparsity == pytest.approx((2 + 271) / (small + large))
    assert report.low_rank_level == 0.0
    assert all(x.rank is None for x in report.layers)


def test_a_weighted_measure_is_not_the_plain_one() -> None:
    # one of two layers is all zero: half of the groups, and a hundredth of the weights
    report = structure(by_hand(torch.zeros(1, 3), torch.ones(99, 3)))
    assert report.group_sparsity == 0.5
    assert report.weighted_group_sparsity == pytest.approx(0.01)
    assert report.element_sparsity == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("grouping", "zero", "groups"),
    [
        ("input", 1, 4),
        ("output", 2, 6),
        ("element", 6 + 8 - 2, 24),
        (Input(block=2), 0, 2),
        (Heads(3, side="output"), 1, 3),
        (Heads(2), 0, 2),
        # axis 0 in two parts: column 3 is zero in both, and rows 0-2 leave nothing but column 0
        (Input(layout=Layout(parts=2)), 2, 8),
    ],
    ids=str,
)
def test_zero_groups_are_counted_by_the_grouping(grouping: Any, zero: int, groups: int) -> None:
    w = torch.ones(6, 4)
    w[:, 3] = 0.0
    w[2:4] = 0.0
    (layer,) = structure(by_hand(w, grouping=grouping)).layers
    assert (layer.zero_groups, layer.groups) == (zero, groups)


def test_packed_projections_are_counted_part_by_part() -> None:
    model = nn.MultiheadAttention(4, 2)
    with torch.no_grad():
        model.in_proj_weight[4:8, 1] = 0.0  # k alone
    layer = structure(regularize(model, LASSO)).layers[0]
    assert (layer.name, layer.zero_groups, layer.groups) == ("in_proj_weight", 1, 12)


def test_low_rank_level_of_an_example() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Conv2d(2, 3, 2, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(8, 2) @ torch.randn(2, 5))  # 2 of 5
        model[1].weight.copy_((torch.randn(3, 1) @ torch.randn(1, 8)).view(3, 2, 2, 2))  # 1 of 3
        model[2].weight.zero_()  # 0 of 4
    report = structure(regularize(model, NuclearNorm(0.1)))
    assert [(x.rank, x.full_rank) for x in report.layers] == [(2, 5), (1, 3), (0, 4)]
    assert report.low_rank_level == pytest.approx(1 - 3 / 12)
    assert report.group_sparsity == report.weighted_group_sparsity == 0.0
    assert report.element_sparsity == pytest.approx(16 / (40 + 24 + 16))


def test_ranks_of_packed_projections_add_up() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(6, 2)
    with torch.no_grad():
        model.in_proj_weight[:6] = torch.outer(torch.randn(6), torch.randn(6))
        model.in_proj_weight[6:12] = 0.0
    layer = structure(regularize(model, NuclearNorm(0.1))).layers[0]
    assert (layer.rank, layer.full_rank, layer.groups) == (1 + 0 + 6, 18, 3)


def test_both_kinds_beside_each_other() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[:, 0] = 0.0
        model[1].weight[:, :2] = 0.0
    report = structure(regularize(model, LASSO, [espalier.Rule("1", penalty=NuclearNorm(1.0))]))
    # each measure over its own layers, single zeros over all
    assert report.group_sparsity == report.weighted_group_sparsity == 0.25
    assert report.low_rank_level == 0.5
    assert report.element_sparsity == (4 + 8) / 32


@pytest.mark.parametrize("shape", [(64, 64), (300, 40), (40, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_rank_of_what_a_prox_returns(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w = torch.randn(shape, dtype=dtype)
    penalty, groups = NuclearNorm(1.0), espalier.Matrix().partition(shape)
    singular = torch.linalg.svdvals(w.double())
    low = penalty.prox(groups.split(w), float(singular[7] + singular[6]) / 2, groups)
    (layer,) = structure(by_hand(groups.merge(low, w.shape), penalty=penalty)).layers
    assert (layer.rank, layer.full_rank) == (7, 40 if 40 in shape else 64)


# ------------------------------------------------------------------------------------------------- kinds of input


@pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
def test_optimizers_and_their_groups_agree(case: OptimizerCase) -> None:
    model = sparse_model()
    raw = structure(regularize(model, LASSO))
    optimizer = case(regularize(model, LASSO))
    assert structure(optimizer) == raw
    assert structure(optimizer.param_groups) == raw


def test_groups_that_an_optimizer_has_taken() -> None:
    groups = regularize(sparse_model(), LASSO)
    before = structure(groups)
    espalier.RAMDA(groups)  # torch rewrites the dictionaries it is given
    assert structure(groups) == before


def test_torch_optimizers_can_be_looked_at() -> None:
    model = sparse_model()
    optimizer = torch.optim.AdamW(regularize(model, LASSO))
    assert structure(optimizer) == structure(regularize(model, LASSO))


def test_tensors_without_names_are_numbered() -> None:
    w = torch.ones(2, 3)
    groups = [{"params": [torch.ones(2)]}, *by_hand(w, torch.zeros(2, 2), grouping="input")]
    report = structure(groups)
    assert [x.name for x in report.layers] == ["parameter 0 of group 1", "parameter 1 of group 1"]
    assert report.weighted_group_sparsity == pytest.approx(4 / 10)


def test_a_grouping_left_out_is_the_penaltys_own() -> None:
    w = torch.eye(3)
    assert structure(by_hand(w, penalty=L1(1.0))).group_sparsity == pytest.approx(6 / 9)
    assert structure(by_hand(w, penalty=LASSO)).group_sparsity == 0.0
    assert structure(by_hand(w, penalty=NuclearNorm(1.0))).layers[0].rank == 3


def test_a_single_tensor_as_params() -> None:
    # torch takes it, and a tensor iterates over its rows
    w = torch.zeros(2, 3)
    (layer,) = structure([{"params": w, "penalty": LASSO}]).layers
    assert (layer.shape, layer.zero_groups) == ((2, 3), 3)


def test_params_that_can_be_walked_only_once() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    monitor = StructureMonitor([{"params": model.parameters(), "penalty": LASSO}])
    assert monitor.look().groups == 5
    assert monitor.look().groups == 5


def test_groups_from_a_generator() -> None:
    assert structure(g for g in by_hand(torch.zeros(1, 1))).group_sparsity == 1.0
    monitor = StructureMonitor(g for g in by_hand(torch.zeros(1, 1)))
    assert [monitor.look().groups for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(
    "target",
    [
        [],
        [{"params": [torch.ones(2, 2)]}],
        [{"params": [torch.ones(2, 2)], "penalty": None}],
        [{"params": [], "penalty": LASSO}],
        torch.optim.SGD(nn.Linear(2, 2).parameters()),
        espalier.ProxSGD(nn.Linear(2, 2).parameters(), lr=0.1),
    ],
    ids=["nothing", "no-penalty", "penalty-none", "no-parameters", "torch", "unpenalised"],
)
def test_nothing_penalised_raises(target: Any) -> None:
    with pytest.raises(ValueError, match=r"no penalised parameter.*Espalier optimizer.*espalier\.regularize"):
        structure(target)
    with pytest.raises(ValueError, match="no penalised parameter"):
        StructureMonitor(target).look()


@pytest.mark.parametrize(
    "target",
    [nn.Linear(2, 2), {"params": [torch.ones(2, 2)], "penalty": LASSO}, torch.ones(2)],
    ids=["model", "one-group", "tensor"],
)
def test_targets_of_the_wrong_kind_say_what_to_pass(target: Any) -> None:
    with pytest.raises(TypeError, match="regularize"):
        structure(target)


# ------------------------------------------------------------------------------------------------- odd weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_float_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w = torch.randn(6, 4).to(dtype)
    w[:, 1] = 0.0
    report = structure(by_hand(w))
    assert (report.group_sparsity, report.element_sparsity) == (0.25, 0.25)
    # whole numbers, exact in each of the types
    exact = torch.outer(torch.arange(1, 7), torch.tensor([1, -1, 2, 3])).to(dtype)
    assert structure(by_hand(exact, penalty=NuclearNorm(1.0))).layers[0].rank == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_low_rank_rounded_to_half_precision_is_still_low(dtype: torch.dtype) -> None:
    # what structured() leaves in a model of half precision: a point of rank 2, rounded
    torch.manual_seed(0)
    w = torch.randn(64, 2) @ torch.randn(2, 64)
    assert structure(by_hand(w, penalty=NuclearNorm(1.0))).layers[0].rank == 2
    assert structure(by_hand(w.to(dtype), penalty=NuclearNorm(1.0))).layers[0].rank == 2


def test_the_smallest_number_is_not_zero() -> None:
    w = torch.zeros(2, 2)
    w[0, 0] = 1e-45
    report = structure(by_hand(w))
    assert (report.group_sparsity, report.element_sparsity) == (0.5, 0.75)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_diverged_weights_are_not_structured(broken: float) -> None:
    w = torch.zeros(3, 3)
    w[0, 0] = broken
    assert structure(by_hand(w)).layers[0].zero_groups == 2
    # a look at a run that has diverged must neither raise nor praise it
    assert structure(by_hand(torch.full((3, 3), broken), penalty=NuclearNorm(1.0))).low_rank_level == 0.0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 0, 3, 3)], ids=str)
@pytest.mark.parametrize(
    ("grouping", "penalty"),
    [("input", LASSO), ("output", LASSO), ("element", LASSO), ("matrix", NuclearNorm(0.1))],
    ids=["input", "output", "element", "matrix"],
)
def test_parameters_without_entries(shape: tuple[int, ...], grouping: str, penalty: espalier.Penalty) -> None:
    empty = by_hand(torch.empty(shape), penalty=penalty, grouping=grouping)
    report = structure(empty)
    assert (report.layers[0].elements, report.layers[0].zero_elements) == (0, 0)
    assert report.element_sparsity == report.weighted_group_sparsity == 0.0
    assert str(report)
    # beside others they change no share of weights
    beside = structure(empty + by_hand(torch.tensor([[0.0, 1.0]])))
    assert beside.weighted_group_sparsity == 0.5
    StructureMonitor(empty).look()


def test_a_number_as_a_parameter() -> None:
    (layer,) = structure(by_hand(torch.tensor(0.0), penalty=L1(1.0))).layers
    assert (layer.shape, layer.groups, layer.zero_groups, layer.elements) == ((), 1, 1, 1)


def test_looking_changes_nothing_and_needs_no_gradient() -> None:
    model = sparse_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    structure(regularize(model, LASSO))
    structure(regularize(model, NuclearNorm(1.0)))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("case", OPTIMIZERS, ids=names(OPTIMIZERS))
def test_the_weights_count_and_not_the_state(case: OptimizerCase) -> None:
    model = sparse_model()
    optimizer = case(regularize(model, LASSO))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert optimizer.state
    before, text = structure(optimizer), str(structure(optimizer))
    for state in optimizer.state.values():
        for value in state.values():
            value.fill_(torch.nan)
    assert structure(optimizer) == before
    assert str(structure(optimizer)) == text
    # and a change of the weights alone is seen
    with torch.no_grad():
        model[0].weight.zero_()
    assert structure(optimizer).layers[0].zero_groups == 4


def test_the_structured_point_is_seen_within_its_context() -> None:
    model = nn.Linear(4, 3)
    optimizer = espalier.RAMDA(regularize(model, GroupLasso(1e3)), lr=0.1, momentum=0.9)
    model.weight.grad = torch.randn(3, 4)
    optimizer.step()
    assert structure(optimizer).group_sparsity == 0.0
    with optimizer.structured():
        assert structure(optimizer).group_sparsity == 1.0
    assert structure(optimizer).group_sparsity == 0.0


# ------------------------------------------------------------------------------------------------- the table


def test_the_printed_table() -> None:
    model = nn.ModuleDict({"body": sparse_model(), "a_head_with_a_long_name": nn.Linear(4, 4)})
    with torch.no_grad():
        model["a_head_with_a_long_name"].weight.copy_(torch.ones(4, 4))
    report = structure(regularize(model, LASSO, [espalier.Rule("a_*", penalty=NuclearNorm(1.0))]))
    head, rule, *rows, blank, share, shares = str(report).splitlines()

    assert re.split(r"\s{2,}", head.strip()) == ["layer", "shape", "zero groups", "share", "zero weights", "rank"]
    assert [re.split(r"\s{2,}", r.strip()) for r in rows] == [
        ["body.0.weight", "2×4×1×1", "1 / 4", "25.0%", "25.0%", "–"],
        ["body.1.weight", "10×6×3×3", "3 / 6", "50.0%", "50.2%", "–"],
        ["a_head_with_a_long_name.weight", "4×4", "–", "–", "0.0%", "1 / 4"],
    ]
    assert set(rule) == {"─", " "}
    assert blank == ""
    assert share == "49.64% of the penalised weights are in groups that are zero (weighted group sparsity)"
    assert shares == "zero groups 40.00%, zero weights 48.40%, low-rank level 75.00%"
    # names flush left, all else flush right under one rule
    assert len({len(line) for line in (head, rule, *rows)}) == 1
    ends = [m.end() for m in re.finditer("─+", rule)]
    starts = [m.start() for m in re.finditer("─+", rule)]
    for line in (head, *rows):
        assert line[0] != " "
        assert all(line[e - 1] != " " for e in ends[1:])
        assert all(line[s - 2 : s] == "  " for s in starts[1:])


def test_the_table_leaves_out_what_does_not_apply() -> None:
    assert "low-rank" not in str(structure(by_hand(torch.ones(2, 2))))
    ranks = str(structure(by_hand(torch.ones(2, 2), penalty=NuclearNorm(1.0))))
    assert "group sparsity" not in ranks
    assert "low-rank level 50.00%" in ranks


# ------------------------------------------------------------------------------------------------- what it is worth


def two_layers() -> nn.Sequential:
    """4 → 6 → 2, of whose 6 inner channels the second layer reads 2: 16 of the 44 parameters are needed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[2].weight[:, [0, 2, 3, 5]] = 0.0
    return model


@pytest.mark.parametrize("example", [torch.ones(1, 4), (torch.ones(1, 4),), {"input": torch.ones(1, 4)}], ids=type)
def test_what_shrink_would_remove(example: Any) -> None:
    model = two_layers()
    before, chances = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    optimizer = espalier.ProxSGD(regularize(model, LASSO))
    report = structure(optimizer, model, example)
    assert torch.equal(torch.get_rng_state(), chances)
    small = espalier.shrink(model, example, gather="never", latency=False).model
    left = sum(p.numel() for p in small.parameters())
    assert (report.parameters, report.shrunk_parameters) == (6 * 5 + 2 * 7, left)
    assert left == 2 * 5 + 2 * 3
    assert report.removable == pytest.approx(1 - left / 44)
    assert "shrink would remove 63.6% of the model's parameters (44 → 16)" in str(report)
    # the same report otherwise, and the model as it was
    assert report.layers == structure(optimizer).layers
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training


def test_sparsity_that_shrink_cannot_use_is_told_apart() -> None:
    # the layer does not read what 2 of its 3 units said before, and they are its outputs all the same
    model = nn.LSTM(4, 3, batch_first=True)
    with torch.no_grad():
        model.weight_hh_l0[:, 1:] = 0.0
    report = structure(regularize(model, LASSO), model, torch.ones(1, 5, 4))
    assert report.weighted_group_sparsity > 0.25
    assert report.removable == 0.0
    assert "shrink would remove 0.0%" in str(report)


def test_the_structured_point_is_what_would_be_shrunk() -> None:
    model = two_layers()
    optimizer = espalier.RAMDA(regularize(model, GroupLasso(1e-9)), lr=1e-3)
    model(torch.ones(3, 4)).sum().backward()
    model[2].weight.grad[:, [0, 2, 3, 5]] = 0.0
    optimizer.step()
    with torch.no_grad():
        model[2].weight.add_(1.0)
    assert structure(optimizer, model, torch.ones(1, 4)).removable == 0.0
    with optimizer.structured():
        assert structure(optimizer, model, torch.ones(1, 4)).removable == pytest.approx(28 / 44)


def test_a_model_that_shrink_refuses_is_measured_all_the_same() -> None:
    model = two_layers()
    report = structure(regularize(model, LASSO), model, torch.ones(1, 5))  # 5 inputs in place of 4
    assert report.removable is None
    assert report.weighted_group_sparsity > 0
    (line,) = report.warnings
    assert line.startswith("shrink refuses this model: the model itself fails on the example inputs")
    assert "would remove" not in str(report)


def test_the_model_and_its_inputs_go_together() -> None:
    model = two_layers()
    for given in ({"model": model}, {"example_inputs": torch.ones(1, 4)}):
        with pytest.raises(TypeError, match=r"structure\(optimizer, model, example_inputs\)"):
            structure(regularize(model, LASSO), **given)


# ------------------------------------------------------------------------------------------------- the monitor


def test_a_monitor_counts_flips() -> None:
    w, v = torch.ones(2, 4), torch.zeros(3, 2)
    monitor = StructureMonitor(by_hand(w, v))
    assert monitor.stable_since == 0

    seen = [monitor.look()]
    seen.append(monitor.look())
    w[:, [0, 1]] = 0.0
    seen.append(monitor.look())
    w[:, 2] *= 5  # a change of weights, and none of structure
    seen.append(monitor.look())
    w[:, 0], w[:, 3], v[:] = 1.0, 0.0, 1.0  # one back, three over
    seen.append(monitor.look())
    seen.append(monitor.look())

    assert [c.look for c in seen] == [1, 2, 3, 4, 5, 6]
    assert [c.flipped for c in seen] == [0, 0, 2, 0, 4, 0]
    assert [c.stable_since for c in seen] == [1, 1, 3, 3, 5, 5]
    assert {c.groups for c in seen} == {6}
    assert monitor.stable_since == 5


def test_a_monitor_follows_ranks() -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 4)
    monitor = StructureMonitor(by_hand(w, penalty=NuclearNorm(1.0)))
    monitor.look()
    w *= 3
    assert monitor.look().flipped == 0
    w[3] = w[2]
    change = monitor.look()
    assert (change.flipped, change.groups, change.stable_since) == (1, 1, 3)
    w.zero_()
    assert monitor.look().flipped == 1


def test_a_monitor_follows_an_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = espalier.ProxSGD(regularize(model, GroupLasso(1e3)), lr=0.1)
    monitor = StructureMonitor(optimizer)
    monitor.look()
    model.weight.grad = torch.randn(3, 4)
    optimizer.step()
    assert monitor.look().flipped == 4


def test_a_monitor_takes_in_groups_added_later() -> None:
    optimizer = espalier.ProxSGD([{"params": [nn.Parameter(torch.ones(2, 3))], "penalty": LASSO}], lr=0.1)
    monitor = StructureMonitor(optimizer)
    monitor.look()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "penalty": LASSO})
    change = monitor.look()
    assert (change.flipped, change.groups) == (0, 5)


@pytest.mark.parametrize("penalty", [LASSO, NuclearNorm(1.0)], ids=lambda p: type(p).__name__)
def test_a_monitor_goes_on_from_a_checkpoint(penalty: espalier.Penalty) -> None:
    torch.manual_seed(0)
    w = torch.randn(3, 3)
    monitor = StructureMonitor(by_hand(w, penalty=penalty))
    monitor.look()
    w[:, 0] = 0.0
    monitor.look()
    monitor.look()

    file = io.BytesIO()
    torch.save(monitor.state_dict(), file)
    file.seek(0)
    resumed = StructureMonitor(by_hand(w, penalty=penalty))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.stable_since == 2
    quiet = resumed.look()
    assert (quiet.look, quiet.flipped, quiet.stable_since) == (4, 0, 2)
    assert monitor.look() == quiet
    w[:, 1] = 0.0
    assert resumed.look() == monitor.look() == Change(5, 1, quiet.groups, 5)


def test_a_saved_state_does_not_move_with_the_monitor() -> None:
    w = torch.ones(1, 2)
    monitor = StructureMonitor(by_hand(w))
    monitor.look()
    saved = monitor.state_dict()
    w[0, 0] = 0.0
    monitor.look()
    resumed = StructureMonitor(by_hand(w))
    resumed.load_state_dict(saved)
    assert (resumed.look().flipped, saved["look"]) == (1, 1)


def test_a_state_of_another_model_is_refused() -> None:
    monitor = StructureMonitor(by_hand(torch.ones(2, 1)))
    monitor.look()
    other = StructureMonitor(by_hand(torch.ones(2, 4)))

    def resume() -> None:
        other.load_state_dict(monitor.state_dict())
        other.look()

    # one flag against four would broadcast, and count as an answer
    with pytest.raises(ValueError, match="parameter 0 of group 0"):
        resume()
