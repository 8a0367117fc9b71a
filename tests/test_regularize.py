"""Which weights carry a penalty, in which groups, and what rules change about it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier import GroupLasso, Heads, Input, Layout, Matrix, NuclearNorm, Output, Rule, regularize

LASSO = GroupLasso(0.1)


@dataclass(frozen=True)
class Got:
    """What regularize gave to one parameter."""

    parameter: nn.Parameter
    penalty: espalier.Penalty | None
    grouping: espalier.Grouping | None

    @property
    def groups(self) -> int:
        assert self.grouping is not None
        return self.grouping.partition(self.parameter.shape).count


def assigned(model: nn.Module, penalty: espalier.Penalty = LASSO, *args: Any, **settings: Any) -> dict[str, Got]:
    """By name, after a check that every trainable parameter is there exactly once and under a name that it has."""
    groups = regularize(model, penalty, *args, **settings)
    got: dict[str, Got] = {}
    for group in groups:
        assert isinstance(group["params"], list)
        for name, p in group["params"]:
            assert name not in got
            assert model.get_parameter(name) is p
            got[name] = Got(p, group.get("penalty"), group.get("grouping"))
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert sorted(id(g.parameter) for g in got.values()) == sorted(trainable)
    return got


def penalised(model: nn.Module, penalty: espalier.Penalty = LASSO, *args: Any, **settings: Any) -> dict[str, Got]:
    return {n: g for n, g in assigned(model, penalty, *args, **settings).items() if g.penalty is not None}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


# ------------------------------------------------------------------------------------------------- defaults


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (nn.Linear(2, 3), {"weight"}),
        (nn.Conv1d(2, 3, 1), {"weight"}),
        (nn.Conv2d(2, 3, 1), {"weight"}),
        (nn.Conv3d(2, 3, 1), {"weight"}),
        (nn.ConvTranspose1d(2, 3, 1), {"weight"}),
        (nn.ConvTranspose2d(2, 3, 1), {"weight"}),
        (nn.ConvTranspose3d(2, 3, 1), {"weight"}),
        (nn.RNN(2, 3), {"weight_ih_l0", "weight_hh_l0"}),
        (nn.GRUCell(2, 3), {"weight_ih", "weight_hh"}),
        (nn.LSTM(2, 3, proj_size=1), {"weight_ih_l0", "weight_hh_l0", "weight_hr_l0"}),
        (
            nn.LSTM(2, 3, num_layers=2, bidirectional=True),
            {f"weight_{a}_l{n}{d}" for a in ("ih", "hh") for n in (0, 1) for d in ("", "_reverse")},
        ),
        # bias_k and bias_v have three axes and are biases all the same
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), {"in_proj_weight", "out_proj.weight"}),
        (
            nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
            {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
        ),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_weights_are_penalised_and_biases_are_not(layer: nn.Module, names: set[str]) -> None:
    got = penalised(layer)
    assert set(got) == names
    assert {g.penalty for g in got.values()} == {LASSO}
    assert all(isinstance(g.grouping, Input) for g in got.values())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.table = nn.ParameterList([nn.Parameter(torch.randn(4, 4))])


@pytest.mark.parametrize(
    "other",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.SyncBatchNorm(4),
        nn.LayerNorm([4, 4]),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.RMSNorm(4),
        nn.Embedding(5, 4),
        nn.EmbeddingBag(5, 4),
        nn.PReLU(4),
        Bare().table,
    ],
    ids=lambda m: type(m).__name__,
)
def test_norms_embeddings_and_the_like_are_left_alone(other: nn.Module) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 4), "other": other})
    assert set(penalised(model)) == {"linear.weight"}


def test_bare_parameters_are_left_alone() -> None:
    assert set(penalised(Bare())) == {"linear.weight"}


class Tied(nn.Module):
    """An embedding whose table is also a linear layer's weight."""

    def __init__(self, head_first: bool, embedding: nn.Module) -> None:
        super().__init__()
        head = nn.Linear(4, 6, bias=False)
        if head_first:
            self.head, self.embedding = head, embedding
        else:
            self.embedding, self.head = embedding, head
        self.head.weight = self.embedding.weight
        self.body = nn.Linear(4, 4)


@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
def test_what_an_embedding_shares_is_left_alone(head_first: bool, embedding: Callable[[int, int], nn.Module]) -> None:
    got = assigned(Tied(head_first, embedding(6, 4)))
    assert {n for n, g in got.items() if g.penalty} == {"body.weight"}
    assert ("head.weight" if head_first else "embedding.weight") in got


def test_frozen_parameters_are_left_out() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    assert set(assigned(model)) == {"2.weight", "2.bias"}


def test_a_shared_module_counts_once_under_its_first_name() -> None:
    layer = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, layer)})
    got = assigned(model)
    assert set(got) == {"a.weight", "a.bias"}
    assert got["a.weight"].groups == 3


def test_a_shared_weight_counts_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert set(penalised(model)) == {"0.weight"}


class Borrowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        # the parent's own parameters are walked before its children's
        self.alias = self.linear.weight


def test_a_weight_known_under_a_bare_name_too_is_penalised() -> None:
    assert set(penalised(Borrowed())) == {"linear.weight"}


def test_layouts_reach_the_groups() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 6),
            "grouped": nn.Conv2d(4, 6, 3, groups=2),
            "transposed": nn.ConvTranspose2d(4, 6, 3, groups=2),
            "lstm": nn.LSTM(4, 6),
            "attention": nn.MultiheadAttention(4, 2),
        }
    )
    inputs = {n: g.groups for n, g in penalised(model).items()}
    assert inputs == {
        "linear.weight": 4,
        "grouped.weight": 4,
        "transposed.weight": 4,
        "lstm.weight_ih_l0": 4,
        "lstm.weight_hh_l0": 6,
        "attention.in_proj_weight": 12,
        "attention.out_proj.weight": 4,
    }
    outputs = {n: g.groups for n, g in penalised(model, grouping="output").items()}
    assert outputs == {
        "linear.weight": 6,
        "grouped.weight": 6,
        "transposed.weight": 6,
        "lstm.weight_ih_l0": 6,
        "lstm.weight_hh_l0": 6,
        "attention.in_proj_weight": 4,
        "attention.out_proj.weight": 4,
    }


def test_subclasses_of_known_layers_are_known() -> None:
    class MyLinear(nn.Linear):
        pass

    assert set(penalised(nn.Sequential(MyLinear(2, 2)))) == {"0.weight"}


def test_layers_that_differ_in_nothing_share_a_parameter_group() -> None:
    groups = regularize(nn.Sequential(nn.Linear(2, 2), nn.Conv2d(2, 2, 1), nn.GRU(2, 2)), LASSO)
    assert [[n for n, _ in g["params"]] for g in groups] == [
        ["0.weight", "1.weight"],
        ["2.weight_ih_l0", "2.weight_hh_l0"],
        ["0.bias", "1.bias", "2.bias_ih_l0", "2.bias_hh_l0"],
    ]
    assert "penalty" not in groups[-1]


def test_a_model_without_other_parameters_has_no_free_group() -> None:
    assert [set(g) for g in regularize(nn.Linear(2, 2, bias=False), LASSO)] == [{"params", "penalty", "grouping"}]


def test_torch_keeps_the_names() -> None:
    optimizer = espalier.RAMDA(regularize(mlp(), LASSO))
    assert [g["param_names"] for g in optimizer.param_groups] == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]


def test_two_calls_give_groups_that_have_nothing_in_common() -> None:
    # torch's optimizers write their settings into the dictionaries they are given
    model = mlp()
    first, second = regularize(model, LASSO), regularize(model, LASSO)
    espalier.RAMDA(first, lr=0.5)
    assert all("lr" not in g for g in second)


@pytest.mark.parametrize(
    ("penalty", "kind"),
    [
        (GroupLasso(1.0), Input),
        (espalier.SparseGroupLasso(1.0), Input),
        (espalier.GroupMCP(1.0), Input),
        (espalier.L1(1.0), espalier.Element),
        (NuclearNorm(1.0), Matrix),
    ],
    ids=lambda v: type(v).__name__,
)
def test_each_penalty_has_a_grouping_of_its_own(penalty: espalier.Penalty, kind: type[espalier.Grouping]) -> None:
    assert {type(g.grouping) for g in penalised(mlp(), penalty).values()} == {kind}


def test_a_penalty_from_elsewhere_needs_no_hash() -> None:
    @dataclass
    class Ridge(espalier.Penalty):
        lam: float

        def value(self, x: Tensor, groups: espalier.Partition) -> Tensor:
            return self.lam * x.square().sum()

        def prox(self, x: Tensor, step: float | Tensor, groups: espalier.Partition) -> Tensor:
            return x / (1 + 2 * step * self.lam)

    # @dataclass without frozen=True is how most people would write one
    assert set(penalised(mlp(), Ridge(0.1))) == {"0.weight", "2.weight"}


# ------------------------------------------------------------------------------------------------- rules

OTHER = GroupLasso(0.5)


def encoder() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
            "conv": nn.Conv1d(4, 4, 3),
            "table": nn.Embedding(5, 4),
            "head": nn.Linear(4, 2),
        }
    )


WEIGHTS = {"encoder.0.weight", "encoder.2.weight", "conv.weight", "head.weight"}


@pytest.mark.parametrize(
    ("match", "reached"),
    [
        ("head.weight", {"head.weight"}),
        ("head", {"head.weight"}),
        ("encoder.*", {"encoder.0.weight", "encoder.2.weight"}),
        ("encoder.[0-1]", {"encoder.0.weight"}),
        ("*.2.*", {"encoder.2.weight"}),
        ("*d*.weight", {"encoder.0.weight", "encoder.2.weight", "head.weight"}),
        ("*", WEIGHTS),
        (nn.Conv1d, {"conv.weight"}),
        (nn.Linear, WEIGHTS - {"conv.weight"}),
        ((nn.Conv1d, nn.GRU), {"conv.weight"}),
        ((nn.Conv1d, nn.Linear), WEIGHTS),
        (nn.modules.conv._ConvNd, {"conv.weight"}),
    ],
    # a set has no order, and test names must be the same in every process
    ids=lambda x: str(sorted(x) if isinstance(x, set) else x),
)
def test_a_rule_reaches_what_it_matches_and_nothing_else(match: Any, reached: set[str]) -> None:
    model = encoder()
    got = penalised(model, LASSO, [Rule(match, penalty=OTHER)])
    assert set(got) == WEIGHTS
    assert {n for n, g in got.items() if g.penalty == OTHER} == reached
    regrouped = penalised(model, LASSO, [Rule(match, grouping="output")])
    assert {n for n, g in regrouped.items() if isinstance(g.grouping, Output)} == reached
    assert all(g.penalty == LASSO for g in regrouped.values())
    if reached != WEIGHTS:
        assert set(penalised(model, LASSO, [Rule(match, penalty=None)])) == WEIGHTS - reached


def test_the_first_rule_that_matches_decides() -> None:
    rules = [Rule("encoder.0", penalty=None), Rule("encoder.*", penalty=OTHER), Rule("*", grouping="output")]
    got = penalised(encoder(), LASSO, rules)
    assert set(got) == WEIGHTS - {"encoder.0.weight"}
    assert got["encoder.2.weight"].penalty == OTHER
    assert isinstance(got["encoder.2.weight"].grouping, Input)
    assert got["head.weight"].penalty == LASSO
    assert isinstance(got["head.weight"].grouping, Output)


def test_a_rule_that_reaches_only_weights_leaves_biases_to_the_next() -> None:
    rules = [Rule("*", penalty=OTHER), Rule("head.bias", grouping="element", any_parameter=True)]
    got = penalised(encoder(), LASSO, rules)
    assert got["head.weight"].penalty == OTHER
    assert got["head.bias"].penalty == LASSO


@pytest.mark.parametrize(
    ("match", "grouping", "groups"),
    [
        ("head.bias", "element", {"head.bias": 2}),
        ("encoder.1.weight", "output", {"encoder.1.weight": 4}),
        (nn.LayerNorm, "element", {"encoder.1.weight": 4, "encoder.1.bias": 4}),
        ("table.*", "input", {"table.weight": 4}),
        ("table.*", "output", {"table.weight": 5}),
        (nn.Embedding, Input(block=2), {"table.weight": 2}),
    ],
    ids=str,
)
def test_any_parameter_can_be_penalised(match: Any, grouping: Any, groups: dict[str, int]) -> None:
    got = penalised(encoder(), LASSO, [Rule(match, grouping=grouping, any_parameter=True)])
    assert set(got) == WEIGHTS | set(groups)
    assert {n: got[n].groups for n in groups} == groups


def test_any_parameter_knows_the_layout_of_known_layers() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(6, 4, 3, groups=2))
    got = penalised(model, LASSO, [Rule("0.*", grouping="output", any_parameter=True)])
    assert {n: g.groups for n, g in got.items()} == {"0.weight": 4, "0.bias": 4}


def test_any_parameter_without_a_penalty_needs_no_grouping() -> None:
    assert set(penalised(encoder(), LASSO, [Rule("encoder*", penalty=None, any_parameter=True)])) == {
        "conv.weight",
        "head.weight",
    }


def test_a_tied_head_can_be_penalised_by_name() -> None:
    got = penalised(Tied(True, nn.Embedding(6, 4)), LASSO, [Rule("head*", grouping="input", any_parameter=True)])
    assert got["head.weight"].groups == 4


def test_rules_may_come_from_any_iterable() -> None:
    # an iterator is used up by the check of the rules, and they must not be forgotten after it
    rules = (Rule(name, penalty=None) for name in ("head", "conv"))
    assert set(penalised(encoder(), LASSO, rules)) == WEIGHTS - {"head.weight", "conv.weight"}


def test_the_grouping_of_all_yields_to_that_of_a_rule() -> None:
    got = penalised(encoder(), LASSO, [Rule("head", grouping=Input(block=2))], grouping="output")
    assert got["conv.weight"].groups == 4
    assert got["head.weight"].groups == 2


def test_a_penalty_of_the_same_kind_keeps_the_grouping_of_all() -> None:
    got = penalised(encoder(), LASSO, [Rule("head", penalty=OTHER)], grouping="output")
    assert isinstance(got["head.weight"].grouping, Output)


def test_a_penalty_of_another_kind_brings_its_own_grouping() -> None:
    got = penalised(encoder(), LASSO, [Rule("head", penalty=NuclearNorm(1.0))], grouping="output")
    assert isinstance(got["head.weight"].grouping, Matrix)
    assert isinstance(got["conv.weight"].grouping, Output)


def test_heads_for_one_layer() -> None:
    model = nn.TransformerEncoderLayer(8, 4, 16, batch_first=True)
    rules = [
        Rule("*.out_proj", grouping=Heads(4)),
        Rule(nn.MultiheadAttention, grouping=Heads(4, side="output")),
    ]
    got = penalised(model, LASSO, rules)
    assert {n: g.groups for n, g in got.items()} == {
        "self_attn.in_proj_weight": 4,
        "self_attn.out_proj.weight": 4,
        "linear1.weight": 8,
        "linear2.weight": 16,
    }


class Packed(nn.Module):
    """q, k and v as one Linear, as timm has them; and a kernel stored as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.kernel = nn.Parameter(torch.randn(6, 4))


def test_a_layout_given_by_hand_is_kept_for_a_known_layer() -> None:
    # Espalier sees a Linear; only the user knows that its rows are q, k and v
    given = Heads(2, side="output", layout=Layout(stacked=3))
    got = penalised(Packed(), LASSO, [Rule("qkv", grouping=given)])["qkv.weight"]
    assert got.grouping is not None
    partition = got.grouping.partition((12, 4))
    # the head of a row: the one group that is not zero when all other rows are
    heads = [partition.zero(partition.split(torch.eye(12)[:, [row] * 4])).logical_not() for row in range(12)]
    assert [h.nonzero().tolist() for h in heads] == [[[0]], [[0]], [[1]], [[1]]] * 3


def test_a_layout_given_by_hand_is_kept_for_a_parameter_of_no_known_layer() -> None:
    given = Input(layout=Layout(input_dim=0, output_dim=1))
    got = penalised(Packed(), LASSO, [Rule("kernel", grouping=given, any_parameter=True)])
    assert got["kernel"].groups == 6


# ------------------------------------------------------------------------------------------------- errors


def raises(says: str, kind: type[Exception] = ValueError) -> Any:
    return pytest.raises(kind, match=f"(?s){says}")


def test_a_rule_that_matches_nothing_lists_the_parameters() -> None:
    with raises(r"'heads'.*matches nothing.*conv\.weight.*head\.weight"):
        regularize(encoder(), LASSO, [Rule("heads", penalty=None)])
    with raises(r"GRU.*matches nothing"):
        regularize(encoder(), LASSO, [Rule(nn.GRU, penalty=None)])


@pytest.mark.parametrize("match", ["*.bias", "encoder.1.*", nn.LayerNorm, nn.Embedding])
def test_a_rule_that_reaches_no_weight_says_how_it_could(match: Any) -> None:
    with raises(r"no layer's weight known.*any_parameter=True and a grouping"):
        regularize(encoder(), LASSO, [Rule(match, penalty=OTHER)])


def test_a_rule_for_frozen_weights_says_that_they_are_frozen() -> None:
    model = encoder()
    model["head"].weight.requires_grad_(False)
    # the trainable bias also matches, and is not what the rule is about
    with raises("frozen|gradient|requires_grad"):
        regularize(model, LASSO, [Rule("head", penalty=OTHER)])


def test_a_useless_rule_after_good_ones_is_found() -> None:
    with raises("matches nothing"):
        regularize(encoder(), LASSO, [Rule("head", penalty=None), Rule("nowhere", penalty=None)])


def test_any_parameter_asks_for_a_grouping() -> None:
    with raises(r"'\*\.bias'.*any_parameter=True needs a grouping"):
        Rule("*.bias", any_parameter=True)


@pytest.mark.parametrize(
    ("penalty", "grouping", "says"),
    [
        (NuclearNorm(1.0), "input", r"0\.weight: NuclearNorm does not fit Input groups.*matrices.*\"matrix\""),
        (LASSO, "matrix", r"0\.weight: GroupLasso does not fit Matrix groups.*entries.*\"input\""),
        (LASSO, "channels", r"no grouping is called 'channels'.*'input'"),
        (LASSO, Input(block=3), r"0\.weight: input groups of 3 cannot cut the 4 channels"),
        (LASSO, Heads(3), r"0\.weight: 3 heads do not divide axis 1"),
    ],
    ids=str,
)
def test_what_does_not_fit_names_the_parameter_and_both_parties(penalty: Any, grouping: Any, says: str) -> None:
    with raises(says):
        regularize(mlp(), penalty, grouping=grouping)
    with raises(says):
        regularize(mlp(), LASSO, [Rule("0", penalty=penalty, grouping=grouping)])


def test_a_parameter_without_the_axis_is_named() -> None:
    with raises(r"head\.bias: input groups need an axis 1.*\"output\" or \"element\""):
        regularize(encoder(), LASSO, [Rule("head.bias", grouping="input", any_parameter=True)])


@pytest.mark.parametrize(
    "model", [nn.ReLU(), nn.LayerNorm(3), nn.Embedding(3, 3), nn.Linear(3, 3).requires_grad_(False)]
)
def test_a_model_with_nothing_to_penalise(model: nn.Module) -> None:
    with raises("no weight to penalise.*any_parameter=True.*model.parameters"):
        regularize(model, LASSO)


def test_rules_that_leave_nothing_to_penalise() -> None:
    with raises("no weight to penalise.*the rules leave"):
        regularize(mlp(), LASSO, [Rule("*", penalty=None)])


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.LazyLinear(3)), r"0\.weight"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyConv2d(3, 1)), r"1\.weight"),
        (nn.LazyLinear(3), r"^weight"),
    ],
    ids=["linear", "conv", "bare"],
)
def test_lazy_modules_must_have_run(model: nn.Module, name: str) -> None:
    with raises(f"{name} has no shape yet.*once on a batch"):
        regularize(model, LASSO)


def test_lazy_modules_that_have_run() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.randn(2, 5))
    assert penalised(model)["0.weight"].groups == 5


@pytest.mark.parametrize("penalty", [1e-4, GroupLasso, "l1", None])
def test_what_is_not_a_penalty_is_refused(penalty: Any) -> None:
    with raises(r"espalier\.GroupLasso\(1e-4\), not", TypeError):
        regularize(mlp(), penalty)


@pytest.mark.parametrize("penalty", [1e-4, GroupLasso, "l1", False])
def test_what_is_not_a_penalty_is_refused_in_a_rule_too(penalty: Any) -> None:
    # silently going on with the penalty of all would be the worst answer
    with raises("penalty", TypeError):
        regularize(mlp(), LASSO, [Rule("0", penalty=penalty)])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: regularize(mlp().parameters(), LASSO), "[Mm]odule|model"),
        (lambda: regularize(mlp(), LASSO, ["0.weight"]), "Rule"),
        (lambda: regularize(mlp(), LASSO, [Rule(["0.weight"], penalty=None)]), "match"),
        (lambda: regularize(mlp(), LASSO, [Rule(nn.Linear(1, 1), penalty=None)]), "match"),
    ],
    ids=["parameters", "text", "list-of-names", "instance"],
)
def test_arguments_of_the_wrong_kind_are_named(make: Callable[[], Any], says: str) -> None:
    with raises(says, TypeError):
        make()


# ------------------------------------------------------------------------------------------------- real models


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=30,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=16,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=8,
            patch_size=4,
        )
    )


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 5)
        self.lstm = nn.LSTM(5, 4, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.tags(self.lstm(self.words(x))[0])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.down = nn.Conv2d(4, 8, 2, stride=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.leave = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(torch.cat([x, self.up(self.down(x))], 1))


class MobileBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.block = nn.Sequential(
            nn.Conv2d(6, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU6(),
            nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU6(),
            nn.Conv2d(12, 6, 1, bias=False),
            nn.BatchNorm2d(6),
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.block(x)).mean((2, 3)))


@dataclass(frozen=True)
class ModelCase:
    """A model, a batch and what is penalised: tensors and groups of inputs, counted by hand."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    tensors: int
    groups: int

    @property
    def name(self) -> str:
        return self.build.__name__


def words() -> Tensor:
    return torch.randint(30, (2, 6))


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def vectors() -> Tensor:
    return torch.randn(2, 5, 8)


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2)


# q, k, v, the attention's output and the first layer of the feed-forward block read 8 channels, the second 12
BLOCK = 5 * 8 + 12

MODELS = (
    ModelCase(bert, words, 2 * 6 + 1, 2 * BLOCK + 8),
    # q, k and v in one layer; the feed-forward block is 32 wide, and the head is tied
    ModelCase(gpt2, words, 2 * 4, 2 * (8 + 8 + 8 + 32)),
    # besides, the patches' convolution reads 3 colours
    ModelCase(vit, images, 1 + 2 * 6 + 1, 3 + 2 * BLOCK + 8),
    # q, k and v in one tensor, in groups of their own
    ModelCase(transformer, vectors, 2 * 4, 2 * BLOCK),
    ModelCase(Tagger, words, 2 * 2 + 1, 2 * (5 + 4) + 8),
    ModelCase(UNet, images, 4, 3 + 4 + 8 + 8),
    ModelCase(MobileBlock, images, 5, 3 + 6 + 12 + 12 + 6),
)
models = pytest.mark.parametrize("case", MODELS, ids=lambda c: c.name)


def backward(model: nn.Module, batch: Tensor) -> None:
    torch.manual_seed(1)
    out = model(batch)
    out = out if isinstance(out, Tensor) else (out.logits if "logits" in out else out.pooler_output)
    (out - torch.randn_like(out)).square().mean().backward()


@models
def test_penalised_weights_of_real_models(case: ModelCase) -> None:
    model = case.build()
    got = assigned(model)
    weights = [g for g in got.values() if g.penalty]
    assert len(weights) == case.tensors
    assert sum(g.groups for g in weights) == case.groups
    assert set(got) == {n for n, _ in model.named_parameters()}


@models
def test_real_models_train(case: ModelCase) -> None:
    torch.manual_seed(0)
    model, batch = case.build(), case.batch()
    before = copy.deepcopy(model.state_dict())
    optimizer = espalier.RAMDA(regularize(model, LASSO), lr=0.1)
    backward(model, batch)
    optimizer.step()
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
        if p.grad is not None and p.grad.any():
            assert not torch.equal(p, before[name]), name
    # the last layers of an encoder without a task may be left without a gradient, and then without a state
    reached = sum(p.grad is not None for g in optimizer.param_groups if g["penalty"] for p in g["params"])
    assert reached >= case.tensors - 1


@models
def test_a_strong_penalty_empties_every_group_of_real_models(case: ModelCase) -> None:
    torch.manual_seed(0)
    model = case.build()
    optimizer = espalier.RAMDA(regularize(model, GroupLasso(1e4)), lr=0.1)
    backward(model, case.batch())
    optimizer.step()
    free = [p.detach().clone() for p in optimizer.param_groups[-1]["params"]]
    with optimizer.structured():
        report = espalier.structure(optimizer)
        assert sum(x.groups for x in report.layers) == case.groups
        assert report.weighted_group_sparsity == report.element_sparsity == 1.0
    # nothing else is touched by the penalty
    assert any(p.any() for p in free)
    assert all(torch.equal(a, b) for a, b in zip(free, optimizer.param_groups[-1]["params"], strict=True))


@models
def test_torch_optimizers_take_the_groups(case: ModelCase) -> None:
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.AdamW(regularize(model, LASSO), lr=0.1)
    backward(model, case.batch())
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert espalier.structure(optimizer).group_sparsity == 0.0


# ------------------------------------------------------------------------------------------------- nuclear norm


def test_the_nuclear_norm_on_every_kind_of_layer() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 6),
            "conv": nn.Conv2d(4, 6, 3),
            "transposed": nn.ConvTranspose2d(4, 6, 3),
            "attention": nn.MultiheadAttention(4, 2),
        }
    )
    got = penalised(model, NuclearNorm(0.1))
    shapes = {n: g.grouping.partition(g.parameter.shape).shape for n, g in got.items() if g.grouping}
    assert shapes == {
        "linear.weight": (1, 6, 4),
        "conv.weight": (1, 6, 36),
        "transposed.weight": (1, 6, 36),
        "attention.in_proj_weight": (3, 4, 4),
        "attention.out_proj.weight": (1, 4, 4),
    }


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(5, 6, bias=False),
        lambda: nn.Conv2d(5, 6, 3, bias=False),
        lambda: nn.ConvTranspose2d(5, 6, 3, bias=False),
    ],
    ids=["linear", "conv", "transposed"],
)
def test_a_layer_of_low_rank_has_outputs_of_low_rank(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer = build().double()
    grouping = penalised(layer, NuclearNorm(1.0))["weight"].grouping
    assert grouping is not None
    partition = grouping.partition(layer.weight.shape)
    view = partition.split(layer.weight.detach())
    singular = torch.linalg.svdvals(view[0])
    # a threshold between the second and the third singular value leaves rank 2
    low = NuclearNorm(1.0).prox(view, float(singular[1] + singular[2]) / 2, partition)
    with torch.no_grad():
        layer.weight.copy_(partition.merge(low, layer.weight.shape))
        y = layer(torch.randn(9, 5, *[4] * (layer.weight.dim() - 2), dtype=torch.float64))
    report = espalier.structure(regularize(layer, NuclearNorm(1.0)))
    assert (report.layers[0].rank, report.layers[0].full_rank) == (2, min(view.shape[1:]))
    # rank 2 over the output channels: what the rows of the matrix must be for that
    assert torch.linalg.matrix_rank(y.movedim(1, 0).flatten(1)) == 2


@pytest.mark.parametrize("case", [MODELS[3], MODELS[4], MODELS[5]], ids=lambda c: c.name)
def test_real_models_train_under_the_nuclear_norm(case: ModelCase) -> None:
    torch.manual_seed(0)
    model = case.build()
    optimizer = espalier.RAMDA(regularize(model, NuclearNorm(1e4)), lr=0.1)
    backward(model, case.batch())
    optimizer.step()
    with optimizer.structured():
        assert espalier.structure(optimizer).low_rank_level == 1.0


def test_a_parametrized_weight_is_not_passed_over_in_silence() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match=r"0\.weight is computed by a parametrization.*remove_parametrizations"):
        groups = regularize(model, GroupLasso(0.1))
    assert [name for name, _ in groups[0]["params"]] == ["1.weight"]


def test_a_single_rule_needs_no_list() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = regularize(model, GroupLasso(0.1), Rule("0", penalty=None))
    assert [name for name, _ in groups[0]["params"]] == ["1.weight"]
