"""Recipes hold the paper's settings, can be changed, shortened and written anew; what is wrong with one is one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from espalier.app import cookbook
from espalier.app.errors import Problem
from espalier.optim.dual_averaging import ramp_length

# lr, λ and momentum = 1 − c, from the paper's experiments; batch; length; milestones
SETTINGS = {
    ("mnist-logreg", "ramda"): (1e-2, 1e-3, 0.99, 128, 500, [100, 200, 300, 400]),
    ("mnist-logreg", "rmda"): (1e-1, 1e-3, 0.9, 128, 500, [100, 200, 300, 400]),
    ("vgg19-cifar10", "ramda"): (1e-2, 8e-7, 0.99, 128, 1000, [200, 400, 600, 800]),
    ("vgg19-cifar10", "rmda"): (1e-1, 1.5e-4, 0.9, 128, 1000, [200, 400, 600, 800]),
    ("vgg19-cifar10", "proxsgd"): (1e-1, 3e-5, 0.9, 128, 1000, [200, 400, 600, 800]),
    ("vgg19-cifar100", "ramda"): (1e-2, 2e-7, 0.99, 128, 1000, [200, 400, 600, 800]),
    ("resnet50-cifar10", "proxgen"): (1e-3, 5e-7, None, 128, 1000, [200, 400, 600, 800]),
    ("resnet50-cifar100", "rmda"): (1e-1, 2e-4, 0.9, 128, 1000, [200, 400, 600, 800]),
    ("resnet50-imagenet", "rmda"): (1.0, 1.35e-5, 0.9, 256, 160, [40, 80, 120]),
    ("transformerxl-wt103", "rmda"): (25.0, 1.65e-7, 0.99, 64, 400_000, [100_000, 200_000, 300_000]),
    ("tacotron2-ljspeech", "ramda"): (2.5e-3, 6e-7, 0.99, 64, 1000, [300, 600]),
    ("mlp-fashionmnist", "proxgen"): (1e-3, 3.5e-3, None, 128, 300, [100, 200]),
    ("vit-mim-cifar10", "rmda"): (10.0, 1e-5, 0.9, 128, 300, [100, 200]),
}


def test_all_of_the_papers_tasks_are_there() -> None:
    assert {name for name, _ in SETTINGS} | {"digits"} == set(cookbook.names())


@pytest.mark.parametrize(("name", "method"), SETTINGS)
def test_the_papers_settings(name: str, method: str) -> None:
    r = cookbook.load(name)
    m = r.methods[method]
    assert (m.lr, m.lam, m.momentum, r.batch, r.length, r.milestones) == SETTINGS[name, method]
    assert m.weight_decay == 0


@pytest.mark.parametrize("name", cookbook.names())
def test_the_head_gives_the_command_and_the_papers_numbers(name: str) -> None:
    r, head = cookbook.load(name), cookbook.text(name).split("\ntitle:")[0]
    assert f"espalier compare {name}" in head
    for method, paper in r.paper.items():
        line = next(x for x in head.splitlines() if x.lower().startswith(f"#   {method}"))
        told = [float(x) for x in re.findall(r"\d+\.\d+", line)]
        assert told == [*paper.quality, *(paper.structure or ())]


def test_lengths_and_milestones_shrink_together() -> None:
    plan = cookbook.load("vgg19-cifar10", ["scale=0.2"]).plan(391)
    assert plan.total == 200 * 391
    assert plan.milestones == tuple(m * 391 for m in (40, 80, 120, 160))
    assert plan.period == 391


@pytest.mark.parametrize("scale", [1.0, 0.2, 0.1, 0.01, 0.001])
def test_c_reaches_1_before_the_end_at_every_scale(scale: float) -> None:
    plan = cookbook.load("vgg19-cifar10", [f"scale={scale}"]).plan(391)
    momentum = plan.momentum(0.99)
    assert ramp_length(1 - momentum) <= (plan.total - plan.milestones[-1]) * 3 / 4
    assert (momentum == 0.99) == (scale >= 0.2)


def test_changes_reach_inside() -> None:
    r = cookbook.load("vgg19-cifar10", ["methods.ramda.lr=3e-3", "model.width=0.5", "data.augment=false", "batch=64"])
    assert (r.methods["ramda"].lr, r.model.options, r.data.options, r.batch) == (
        3e-3, {"width": 0.5}, {"augment": False}, 64,
    )  # fmt: skip


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(cookbook.text("digits").replace("length: 50", "length: 21"))
    assert cookbook.load(str(mine)).length == 21
    # a key that is given beside those of an anchor is not there twice
    merged = "methods:\n  ramda: &first {lr: 0.1, momentum: 0.9}\n  rmda: {<<: *first, lr: 0.5}\n"
    mine.write_text(cookbook.text("digits").split("methods:")[0] + merged)
    assert cookbook.load(str(mine)).methods["rmda"].lr == 0.5


BAD = {
    "an unknown key": (["epoch=3"], r"no key is called 'epoch'"),
    "nearly a key": (["lenght=3"], r"no key is called 'lenght' \(did you mean 'length'\?\)"),
    "nearly a method's key": (["methods.ramda.lamda=3"], r"'methods.ramda.lamda' \(did you mean 'lam'\?\)"),
    "a word for a number": (["batch=many"], r"batch='many': input should be a valid integer"),
    "a negative lr": (["methods.ramda.lr=-1"], r"methods.ramda.lr=-1: input should be greater than 0"),
    "not finite": (["methods.ramda.lr=.inf"], r"methods.ramda.lr=inf"),
    "momentum 1": (["methods.ramda.momentum=1"], r"momentum=1: input should be less than 1"),
    "no value": (["scale"], r"--set scale: write key=value"),
    "into a plain value": (["batch.size=3"], r"batch is a plain value"),
    "an unknown model": (["model.name=vgg18"], r"model: no model 'vgg18' \(did you mean 'vgg19'\?\)"),
    "an unknown option": (["model.widht=3"], r"no option of the model vgg19 is called 'widht' \(did you mean 'width'"),
    "an unknown method without an optimizer": (["methods.lamb.lr=1"], r"the key 'methods.lamb.optimizer' is missing"),
    "an unknown penalty": (["penalty=lasso"], r"penalty='lasso': input should be 'group-lasso'"),
    "milestones beyond the end": (["length=300"], r"milestones must increase and end before the length 300"),
    "λ without a penalty": (["methods.dense.lam=1"], r"sgd has no penalty"),
    "weight decay in dual averaging": (["methods.ramda.weight_decay=1"], r"ramda has no weight decay"),
    "parts that do not fit": (["accumulate=3"], r"batch 128 can't be cut into accumulate = 3"),
    "not YAML": (["batch=[1"], r"the value is not YAML"),
    "a key twice": (["methods.ramda={lr: 1, lr: 2, lam: 1}"], r"--set methods.ramda=.*: line 1: the key 'lr' is there"),
    "a date that is none": (["title=2024-13-45"], r"--set title=2024-13-45: the value is not YAML"),
    "a word as a whole number": (["batch=!!int x"], r"the value is not YAML"),
    "a word as a truth": (["batch=!!bool x"], r"the value is not YAML"),
    "nothing as a whole number": (["batch=!!int ''"], r"the value is not YAML"),
    "a list that is a time": (["batch=!!timestamp [1]"], r"the value is not YAML"),
    "an object": (["title=!!python/object/apply:os.system [ls]"], r"the value is not YAML"),
    "nested too deep": (["title=" + "[" * 3000], r"--set title=\[\[.*\.\.\.: the value is not YAML"),
    "5000 digits": (["batch=" + "9" * 5000], r"--set batch=99.*\.\.\.: the value is not YAML"),
    "5000 digits of another kind": (["batch=0x" + "f" * 5000], r"batch=a value too large to write: input should be"),
    "more steps than a float counts": (["length=0x" + "f" * 400], r"length=\d+\.\.\.: input should be less than"),
    "an alias of itself": (["data.options=&a [*a]"], r"line 1: an alias names what it is itself a part of"),
    "a long value": (["batch=" + "x " * 5000], r"batch='x x .*\.\.\.: input should be a valid integer"),
    "lines": (["batch.size=a\nb"], r"--set batch.size=a b: batch is a plain value"),
    "a key of lines": (["a\nb=1"], r"no key is called 'a.{1,2}nb'"),
    "no value, at length": (["x" * 5000], r"--set xxx.*\.\.\.: write key=value"),
    "a warm-up before stages": (
        ["methods.rmda.warmup=0.1"],
        r"warmup is for the schedules cosine, linear and cons",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_line(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(Problem, match=message) as seen:
        cookbook.load("vgg19-cifar10", changes)
    assert "\n" not in str(seen.value)
    assert len(str(seen.value)) < 400


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: [", "is not YAML"),
        ("title: 2024-13-45", "is not YAML: month must be in 1..12"),
        (LAUGHS, r"bad.yaml, line 5: with its aliases it holds more than 10,000 values"),
        ("a: &a {<<: *a}", "bad.yaml, line 1: an alias names what it is itself a part of"),
        ("? [a, b]\n: 1", "bad.yaml"),
        ("1: 2\n2: 3", "bad.yaml"),
        ("just words", "is no recipe"),
        ("title: x", "the key 'task' is missing"),
        ("title: x\nmethods:\n  ramda: {lr: 1, lam: 2, lr: 3}", r"bad.yaml, line 3: the key 'lr' is there twice"),
    ],
)
def test_files_that_are_no_recipes(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(Problem, match=message) as seen:
        cookbook.load(str(file))
    assert "\n" not in str(seen.value)


def test_names_that_are_not_there() -> None:
    with pytest.raises(Problem, match=r"no recipe 'vgg19-cifar' \(did you mean 'vgg19-cifar10'"):
        cookbook.load("vgg19-cifar")
    with pytest.raises(Problem, match=r"can't read the recipe nowhere.yaml: No such file"):
        cookbook.load("nowhere.yaml")
    with pytest.raises(Problem, match=r"no method 'ramdaa' \(did you mean 'ramda'"):
        cookbook.load("digits").only("ramdaa")
    with pytest.raises(Problem, match="scale 1e-06 leaves no step between two of the milestones"):
        cookbook.load("digits", ["scale=1e-6"]).plan(15)
