"""Layers of shrunk models, and models on disk: what comes back is what was saved, to the bit, or an error."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from espalier.compact.attention import HeadAttention
from espalier.compact.export import export
from espalier.compact.layers import Gather, LowRank, factor
from espalier.compact.layout import channels_last
from espalier.compact.restore import load
from espalier.compact.store import save

# by name: the package offers functions of the modules' names
store, export_module = (importlib.import_module(f"espalier.compact.{n}") for n in ("store", "export"))
Pair = namedtuple("Pair", ["left", "right"])


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, bias=False),
        nn.GroupNorm(4, 12),
        nn.Flatten(),
        nn.Linear(108, 10),
    )


def cut_convnet(model: Any) -> None:
    """Five of eight channels, and a bias that folding has left behind."""
    a, norm, b = model[0], model[1], model[3]
    keep = torch.tensor([0, 2, 3, 6, 7])
    a.weight, a.bias = (nn.Parameter(t.detach()[keep]) for t in (a.weight, a.bias))
    a.out_channels = norm.num_features = b.in_channels = 5
    norm.weight, norm.bias = (nn.Parameter(t.detach()[keep]) for t in (norm.weight, norm.bias))
    norm.running_mean, norm.running_var = torch.randn(5), torch.rand(5) + 0.5
    b.weight = nn.Parameter(b.weight.detach()[:, keep])
    b.bias = nn.Parameter(torch.randn(12))


class Tagger(nn.Module):
    """An LSTM of two layers, and a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 3)
        self.register_buffer("scale", torch.ones(16), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.lstm(self.embed(x))[0] * self.scale)
        return y


def cut_tagger(model: Any) -> None:
    model.lstm.hidden_size, model.out.in_features = 5, 10
    for name, p in list(model.lstm.named_parameters()):
        columns = () if p.dim() == 1 else (5 if "hh" in name else 10 if "l1" in name else 6,)
        setattr(model.lstm, name, nn.Parameter(torch.randn(20, *columns)))
    model.out.weight = nn.Parameter(torch.randn(3, 10))
    model.scale = torch.rand(10)


class Tied(nn.Module):
    """Tied weights, a module with two names, and a buffer in a parameter's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.Linear(6, 6)
        self.again = nn.Sequential(self.block, nn.Tanh())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("view", self.embed.weight.detach())
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.again(self.block(self.embed(x))))
        return y


def cut_tied(model: Any) -> None:
    model.embed.weight = model.head.weight = nn.Parameter(torch.randn(11, 4), requires_grad=False)
    model.view = model.embed.weight.detach()
    model.embed.embedding_dim = model.head.in_features = 4
    model.block.weight, model.block.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    model.block.in_features = model.block.out_features = 4


def gather_shared(model: Any) -> None:
    """The module that has two names is replaced at both."""
    model.block = model.again[0] = Gather(nn.Linear(4, 6), -1, torch.tensor([5, 0, 1, 3]))


def unshare(model: Any) -> None:
    model.again[0] = nn.Linear(6, 6)


def mixed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect"), nn.Flatten(), nn.Linear(512, 40))


def low_rank(layer: Any, rank: int = 2) -> LowRank:
    with torch.no_grad():
        m, n = layer.weight.flatten(1).shape
        layer.weight.copy_((torch.randn(m, rank) @ torch.randn(rank, n)).reshape(layer.weight.shape) / n**0.5)
    found = factor(layer, 1e-5)
    assert found is not None
    return found[0]


def cut_mixed(model: Any) -> None:
    """One of our layers in another, both ways round."""
    model[0] = low_rank(model[0])
    model[0].first = Gather(model[0].first, 1, torch.tensor([0, 2]))
    first = model[0].first.layer
    first.weight, first.in_channels = nn.Parameter(first.weight.detach()[:, [0, 2]].contiguous()), 2
    model[2].weight, model[2].in_features = nn.Parameter(model[2].weight.detach()[:, :300].contiguous()), 300
    model[2] = Gather(low_rank(model[2]), -1, torch.arange(300))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attend(x, x, x, need_weights=False)[0]
        return y


def cut_attention(model: Any) -> None:
    model.attend = HeadAttention.from_dense(model.attend, [0, 2])


def nothing(model: nn.Module) -> None:
    pass


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def words() -> Tensor:
    return torch.randint(0, 11, (2, 5))


Case = tuple[Callable[[], nn.Module], Callable[[Any], None], Callable[[], Tensor]]
CASES: dict[str, Case] = {
    "convnet": (convnet, cut_convnet, images),
    "dense": (convnet, nothing, images),
    "lstm": (Tagger, cut_tagger, words),
    "tied": (Tied, cut_tied, words),
    "tied, dense": (Tied, nothing, words),
    "shared module gathers": (Tied, gather_shared, words),
    "no longer shared": (Tied, unshare, words),
    "gather and low rank": (mixed, cut_mixed, images),
    "attention": (Attention, cut_attention, lambda: torch.randn(2, 5, 12)),
    "root is ours": (lambda: nn.Linear(6, 4), nothing, lambda: torch.randn(2, 6)),
}


def make(name: str) -> tuple[nn.Module, Tensor, Callable[[], nn.Module]]:
    """The smaller model, its input, and the code of the dense one."""
    torch.manual_seed(0)
    build, cut, inputs = CASES[name]
    model = build()
    cut(model)
    if name == "root is ours":
        model = Gather(nn.Linear(3, 4), -1, torch.tensor([1, 2, 5]))
    return model.eval(), inputs(), build


every_case = pytest.mark.parametrize("name", CASES)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


# layers


@pytest.mark.parametrize(
    ("layer", "x", "dim"),
    [
        (nn.Linear(3, 5), torch.randn(2, 4, 6), -1),
        (nn.Conv1d(3, 5, 3), torch.randn(2, 6, 8), 1),
        (nn.Conv2d(3, 5, 3), torch.randn(2, 6, 8, 8), 1),
        (nn.Conv2d(3, 5, 3), torch.randn(6, 8, 8), -3),
    ],
)
def test_gather_selects(layer: nn.Module, x: Tensor, dim: int) -> None:
    gather = Gather(layer, dim, torch.tensor([4, 0, 1]))
    assert torch.equal(gather(x), layer(torch.stack([x.select(dim, i) for i in (4, 0, 1)], dim)))
    assert set(gather.state_dict()) == {"index", "layer.weight", "layer.bias"}
    assert Gather.empty(layer, **gather.spec()).spec() == gather.spec() == {"dim": dim, "entries": 3}
    compiled = torch.compile(gather, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), gather(x), atol=1e-6)


@pytest.mark.parametrize("index", [torch.tensor([[0]]), torch.tensor([0.0]), torch.tensor([1], dtype=torch.int32)])
def test_gather_refuses_what_is_no_index(index: Tensor) -> None:
    with pytest.raises(ValueError, match="int64"):
        Gather(nn.Linear(1, 1), 1, index)


FACTORED = {
    "linear": (lambda **k: nn.Linear(30, 20, **k), (4, 30)),
    "conv1d": (lambda **k: nn.Conv1d(6, 20, 5, dilation=2, **k), (4, 6, 12)),
    "conv2d": (lambda **k: nn.Conv2d(6, 20, 3, stride=2, padding=1, padding_mode="circular", **k), (4, 6, 9, 9)),
    "conv2d same": (lambda **k: nn.Conv2d(6, 20, (3, 5), padding="same", **k), (4, 6, 9, 9)),
    "conv3d": (lambda **k: nn.Conv3d(6, 20, 2, padding=(0, 1, 1), **k), (4, 6, 4, 4, 4)),
}


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_factored_layer_computes_the_same(name: str, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    build, shape = FACTORED[name]
    layer: Any = build(bias=bias, dtype=torch.float64)
    m, n = layer.weight.flatten(1).shape
    with torch.no_grad():
        u, _, vh = torch.linalg.svd(layer.weight.flatten(1), full_matrices=False)
        s = torch.tensor([2.0, 1.0, 0.5, 1e-6])
        layer.weight.copy_(((u[:, :4] * s) @ vh[:4]).reshape(layer.weight.shape))
    layer = layer.to(dtype).eval()
    layer.weight.requires_grad_(False)
    rtol = max(1e-4, 4 * torch.finfo(dtype).eps)
    state = torch.random.get_rng_state()
    found = factor(layer, rtol)
    assert torch.equal(state, torch.random.get_rng_state())
    assert found is not None
    product, bound = found
    assert product.spec() == {"rank": 3}
    assert LowRank.empty(layer, 3).spec() == {"rank": 3}
    assert not product.training
    assert all(p.dtype == dtype for p in product.parameters())
    assert {k: p.requires_grad for k, p in product.named_parameters()} == {
        "first.weight": False,
        "second.weight": False,
    } | ({"second.bias": True} if bias else {})
    assert sum(p.numel() for p in product.parameters()) == 3 * (m + n) + bias * m
    if dtype == torch.float64:
        assert bound == pytest.approx(1e-6, rel=1e-6)
    # √Σ on both sides
    gram = [product.first.weight.flatten(1).double(), product.second.weight.flatten(1).double().T]
    for part in gram:
        assert torch.allclose(
            torch.linalg.svdvals(part).square(), s[:3].double(), rtol=20 * torch.finfo(dtype).eps + 1e-5
        )
    x = torch.randn(shape, dtype=dtype)
    gap = (product(x).double() - layer(x).double()).abs().max()
    assert gap <= (bound + 16 * torch.finfo(dtype).eps) * x.double().flatten(1).norm(dim=1).max()
    # by the definition: the spectral norm of what was cut off
    whole = (gram[1].T @ gram[0]) - layer.weight.double().flatten(1)
    assert torch.linalg.matrix_norm(whole, 2) <= bound + 16 * torch.finfo(dtype).eps


def ranked(m: int, n: int, r: int) -> nn.Linear:
    layer = nn.Linear(n, m, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(torch.randn(m, n, dtype=torch.float64), full_matrices=False)
    layer.weight = nn.Parameter(u[:, :r] @ vh[:r])
    return layer


@pytest.mark.parametrize(
    ("m", "n", "r", "pays"), [(6, 3, 2, False), (12, 4, 2, True), (12, 4, 3, False), (8, 8, 4, False)]
)
def test_factors_have_fewer_weights_or_are_not_made(m: int, n: int, r: int, pays: bool) -> None:
    # 2 (6 + 3) = 6 · 3 and 4 (8 + 8) = 8 · 8: equal is not fewer
    assert (factor(ranked(m, n, r), 1e-8) is not None) == pays == (r * (m + n) < m * n)


class Odd(nn.Linear):
    pass


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 32, 3, groups=2),
        nn.ConvTranspose2d(8, 32, 3),
        nn.Linear(32, 32),
        Odd(32, 32),
    ],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_layers_that_stay(layer: Any, value: float) -> None:
    nn.init.constant_(layer.weight, value)
    stays = type(layer) is not nn.Linear or value != 1.0
    assert (factor(layer, 1e-5) is None) == stays


@pytest.mark.parametrize("rtol", [-1e-3, 1.0, float("nan")])
def test_rtol_is_checked(rtol: float) -> None:
    with pytest.raises(ValueError, match="rtol"):
        factor(nn.Linear(2, 2), rtol)


def test_low_rank_refuses_other_layers() -> None:
    with pytest.raises(ValueError, match="Embedding has no low-rank form"):
        LowRank.empty(nn.Embedding(3, 3), 1)


# save and load


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_loaded_model_is_the_saved_one(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, x, build = make(name)
    model = model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    next(model.parameters()).requires_grad_(False)
    save(model, tmp_path / "m")
    torch.manual_seed(1)
    back = load(tmp_path / "m", build)
    assert not any(m.training for m in back.modules())
    assert torch.equal(back(x), model(x))
    here, there = tensors(model), tensors(back)
    assert here.keys() == there.keys()
    for k, t in here.items():
        assert torch.equal(t, there[k]), k
        assert (t.dtype, t.requires_grad, type(t)) == (there[k].dtype, there[k].requires_grad, type(there[k]))
    # the same are one, the others are not
    for shared in (id, lambda t: t.data_ptr()):
        groups = [{k: [n for n in d if shared(d[n]) == shared(t)] for k, t in d.items()} for d in (here, there)]
        assert groups[0] == groups[1]
    assert repr(back) == repr(model)
    # what came back can be saved, trained and copied
    save(back, tmp_path / "m")
    again = load(tmp_path / "m", build)
    assert torch.equal(again(x), model(x))
    again.train()(x).sum().backward()
    assert torch.equal(copy.deepcopy(back)(x), model(x))


@every_case
def test_nothing_in_the_files_is_pickle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, build = make(name)
    expected = model(x)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle")

    for module, names in ((pickle, ("load", "loads", "dump", "dumps", "Unpickler")), (torch, ("load", "save"))):
        for n in names:
            monkeypatch.setattr(module, n, refuse)
    save(model, tmp_path / "m")
    assert torch.equal(load(tmp_path / "m", build)(x), expected)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["m", "manifest.json", "model.safetensors"]


def test_the_manifest_says_what_the_model_is(tmp_path: Path) -> None:
    model, _, _ = make("gather and low rank")
    save(model, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["model"] == "Sequential"
    assert (manifest["format"], manifest["version"]) == ("espalier", 2)
    modules = manifest["modules"]
    assert (modules["2"]["kind"], modules["2"]["spec"]) == ("gather", {"dim": -1, "entries": 300})
    assert (modules["2.layer"]["kind"], modules["2.layer"]["spec"]) == ("low_rank", {"rank": 2})
    assert (
        modules["0.second"]["attributes"] | {"in_channels": 2, "kernel_size": [1, 1]}
        == modules["0.second"]["attributes"]
    )
    assert manifest["tensors"]["2.index"] == {"shape": [300], "dtype": "int64", "requires_grad": False}


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    save(make("tied")[0], tmp_path / "m")
    written = load_file(tmp_path / "m" / "model.safetensors")
    assert set(written) == {"view", "block.weight", "block.bias"}
    manifest = json.loads((tmp_path / "m" / "manifest.json").read_text())
    assert manifest["tensors"]["head.weight"] == manifest["tensors"]["embed.weight"] == {"same": "view"}
    assert manifest["modules"]["again.0"] == {"same": "block"}
    assert manifest["absent"] == ["none", "head.bias"]


def test_slices_of_one_storage_are_written_apart(tmp_path: Path) -> None:
    # as cuDNN lays out the weights of an LSTM
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    flat = torch.randn(18)
    model[0].weight, model[1].weight = (nn.Parameter(t.view(3, 3)) for t in flat.split(9))
    save(model, tmp_path / "m")
    back = load(tmp_path / "m", lambda: nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2))))
    assert torch.equal(torch.cat([p.flatten() for p in back.parameters()]), flat)
    assert (tmp_path / "m" / "model.safetensors").stat().st_size < 4 * 18 + 300


def test_build_may_be_a_model_and_stays_as_it_is(tmp_path: Path) -> None:
    model, x, build = make("convnet")
    save(model, str(tmp_path / "m"))
    dense = build()
    before = {k: t.clone() for k, t in tensors(dense).items()}
    back = load(str(tmp_path / "m"), dense)
    assert torch.equal(back(x), model(x))
    assert dense.training
    assert all(torch.equal(t, before[k]) for k, t in tensors(dense).items())
    assert torch.equal(load(tmp_path / "m", model)(x), model(x))  # one that is small already
    with torch.device("meta"):
        bare = build()
    assert torch.equal(load(tmp_path / "m", bare)(x), model(x))


@pytest.mark.parametrize("lies", [torch.contiguous_format, torch.channels_last])
def test_weights_lie_as_what_was_built(lies: torch.memory_format, tmp_path: Path) -> None:
    model = convnet()
    model[3] = Gather(nn.Conv2d(3, 12, 3, stride=2, bias=False), 1, torch.tensor([0, 4, 5]))
    save(model, tmp_path / "saved")
    again = load(tmp_path / "saved", lambda: convnet().to(memory_format=lies))
    weights = [again[0].weight, again[3].layer.weight]
    assert [channels_last(w) for w in weights] == [lies == torch.channels_last] * 2
    assert all(map(torch.equal, weights, (model[0].weight, model[3].layer.weight)))


def test_attributes_of_other_kinds_come_from_the_code(tmp_path: Path) -> None:
    model, _, _ = make("lstm")
    model.calls, model.seen, model.flag = 7, 3, True  # type: ignore[assignment]
    save(model, tmp_path / "m")
    back = load(tmp_path / "m", Tagger)
    assert (back.calls, back.seen) == (7, 3)
    assert "flag" not in vars(back)


def test_a_directory_of_ours_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name in ("convnet", "tied"):
        model, x, build = make(name)
        save(model, tmp_path / "m")
        assert torch.equal(load(tmp_path / "m", build)(x), model(x))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    save(model, tmp_path / "deep" / "er" / "m")
    # readable by whoever may read the directory
    assert (tmp_path / "m" / "model.safetensors").stat().st_mode & 0o444 == (tmp_path / "m").stat().st_mode & 0o444


@pytest.mark.parametrize(
    "files",
    [{"notes.txt": "x"}, {"manifest.json": "{}"}, {"manifest.json": "["}, {"model.safetensors": "x"}, {"keep/a": "b"}],
    ids=str,
)
def test_other_directories_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_text(text)
    with pytest.raises(FileExistsError, match=r"espalier\.save did not write"):
        save(nn.Linear(1, 1), tmp_path / "m")
    assert all((tmp_path / "m" / n).read_text() == t for n, t in files.items())
    with pytest.raises(FileExistsError, match="is a file"):
        save(nn.Linear(1, 1), tmp_path / "m" / next(iter(files)))


def test_a_file_of_the_user_in_our_directory_is_not_lost(tmp_path: Path) -> None:
    save(nn.Linear(1, 1), tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        save(nn.Linear(1, 1), tmp_path / "m")


def test_saving_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, build = make("convnet")
    save(model, tmp_path / "m")

    def full(path: Path) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(store, "digest", full)
    with pytest.raises(OSError, match="disk full"):
        save(build(), tmp_path / "m")
    with pytest.raises(OSError, match="disk full"):
        save(build(), tmp_path / "n")
    monkeypatch.undo()
    assert torch.equal(load(tmp_path / "m", build)(x), model(x))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}


def sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("where", torch.eye(2).to_sparse())
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(Extra(2, 2)), "'0' .Extra. has extra state"),
        (nn.Sequential(nn.LazyLinear(2)), "'0.weight' is not initialised"),
        (nn.Sequential(nn.LazyBatchNorm1d()), "'0.weight' is not initialised"),
        (nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (nn.Linear(2, 2, dtype=torch.complex128), "'weight' is a torch.strided tensor of torch.complex128"),
        (sparse(), "'where' is a torch.sparse_coo"),
    ],
)
def test_models_that_cannot_be_saved(model: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        save(model, tmp_path / "m")
    assert not any(tmp_path.iterdir())


# bad files


def edit(path: Path, **changes: Any) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_in(path: Path, table: str, name: str, entry: dict[str, Any] | None) -> None:
    content = json.loads((path / "manifest.json").read_text())[table]
    if entry is None:
        del content[name]
    else:
        content[name] = content.get(name, {}) | entry
    edit(path, **{table: content})


def retensor(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Other tensors under a hash that fits them."""
    content = load_file(path / "model.safetensors")
    change(content)
    save_file(content, path / "model.safetensors")
    rehash(path)


def rehash(path: Path) -> None:
    file = path / "model.safetensors"
    edit(path, bytes=file.stat().st_size, sha256=store.digest(file))


def overwrite(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    (path / name).write_bytes(change((path / name).read_bytes()))


def garbage(path: Path) -> None:
    overwrite(path, "model.safetensors", lambda b: b"x" * len(b))
    rehash(path)


T, M = "model.safetensors", "manifest.json"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: overwrite(p, T, lambda b: b[:-5]), f"{T}: truncated: .* Copy or save"),
    "empty": (lambda p: overwrite(p, T, lambda b: b""), f"{T}: truncated: 0 bytes"),
    "longer": (lambda p: overwrite(p, T, lambda b: b + b"x"), f"{T}: changed: "),
    "one bit": (lambda p: overwrite(p, T, lambda b: b[:-1] + bytes([b[-1] ^ 1])), f"{T}: changed since it was saved"),
    "no safetensors": (garbage, f"{T}: not valid safetensors"),
    "tensor missing": (lambda p: retensor(p, lambda d: d.pop("0.bias")), f"{T}: tensor '0.bias' is missing"),
    "tensor too many": (lambda p: retensor(p, lambda d: d.update(x=torch.ones(1))), f"{T}: tensor 'x' is unexpected"),
    "shape": (lambda p: retensor(p, lambda d: d.update({"0.bias": torch.ones(3)})), r"'0.bias' is float32 \[3\], and"),
    "dtype": (lambda p: retensor(p, lambda d: d.update({"0.bias": d["0.bias"].half()})), "'0.bias' is float16"),
    "cut JSON": (lambda p: overwrite(p, M, lambda b: b[:-5]), f"{M}: not valid JSON"),
    "deep JSON": (lambda p: overwrite(p, M, lambda b: b"[" * 100_000), f"{M}: not valid JSON"),
    "binary JSON": (lambda p: overwrite(p, M, lambda b: b"\xff\xfe" + b), f"{M}: not valid JSON"),
    "other JSON": (lambda p: overwrite(p, M, lambda b: b"[]"), f"{M}: not a manifest of Espalier"),
    "other format": (lambda p: edit(p, format="x"), f"{M}: not a manifest of Espalier"),
    "newer": (lambda p: edit(p, version=3, espalier="9.0"), "format version 3, .* Load it with Espalier 9.0"),
    "no hash": (lambda p: edit(p, sha256=None), "'sha256' is missing"),
    "no tensors": (lambda p: edit(p, tensors=[]), "'tensors' is missing or not a dict"),
    "bad entry": (lambda p: edit_in(p, "tensors", "0.bias", {"shape": 3}), "entry of 'tensors' is not complete"),
    "bad module": (lambda p: edit(p, modules={"0": 3}), "entry of 'modules' is not complete"),
    "no manifest": (lambda p: (p / M).unlink(), f"{M}: there is no such file, .* espalier.save wrote"),
    "module missing": (lambda p: edit_in(p, "modules", "1", None), "build made a module '1' .BatchNorm2d."),
    "module too many": (lambda p: edit_in(p, "modules", "9", {"type": "X", "attributes": {}}), "has a module '9'"),
    "type": (lambda p: edit_in(p, "modules", "2", {"type": "GELU"}), "module '2' is a GELU, and build made a ReLU"),
    "kind": (lambda p: edit_in(p, "modules", "2", {"kind": "os", "spec": {}}), "cannot be made a os"),
    "spec": (lambda p: edit_in(p, "modules", "3", {"kind": "low_rank", "spec": {"x": 1}}), "made a low_rank of"),
    "not ours": (lambda p: edit_in(p, "modules", "2", {"kind": "low_rank", "spec": {"rank": 1}}), "ReLU has no low-r"),
    "heads": (
        lambda p: edit_in(p, "modules", "2", {"kind": "head_attention", "spec": {"heads": 1}}),
        "a ReLU, cannot be made a head_attention",
    ),
    "negative": (lambda p: edit_in(p, "modules", "3", {"kind": "gather", "spec": {"dim": 1, "entries": -1}}), "gather"),
    "loop": (lambda p: edit_in(p, "modules", "1", {"same": "77"}), "has a module '1'"),
    "cycle": (lambda p: edit_in(p, "modules", "1", {"same": ""}), "build made a module '1.0'"),
    "parameter": (lambda p: edit_in(p, "modules", "3", {"attributes": {"bias": 3}}), "'bias' of module '3'"),
    "method": (lambda p: edit_in(p, "modules", "0", {"attributes": {"forward": 3}}), "'forward' of module '0'"),
    "private": (lambda p: edit_in(p, "modules", "0", {"attributes": {"_buffers": 3}}), "'_buffers' of module '0'"),
    "kind of another type": (lambda p: edit_in(p, "modules", "2", {"kind": []}), "entry of 'modules' is not complete"),
    "kind of a dict": (lambda p: edit_in(p, "modules", "2", {"kind": {}}), "entry of 'modules' is not complete"),
    "changed of another type": (lambda p: edit_in(p, "modules", "2", {"changed": 3}), "entry of 'modules' is not comp"),
    "changed in no object": (
        lambda p: edit_in(p, "modules", "2", {"changed": {"a.b": 3}}),
        "'a.b' of module '2' is no",
    ),
    "changed in ours": (
        lambda p: edit_in(p, "modules", "2", {"changed": {"_forward_hooks.b": 3}}),
        "'_forward_hooks.b' of module '2' is no",
    ),
    "probe": (lambda p: edit(p, probe={"inputs": 3}), "'probe' is not complete"),
    "probe of another type": (lambda p: edit(p, probe=[]), "'probe' is not complete"),
    "text": (lambda p: edit_in(p, "modules", "0", {"attributes": {"groups": "1"}}), "cannot become '1'"),
    "tie": (lambda p: edit_in(p, "tensors", "zzz", {"same": "0.bias"}), "'zzz' is unexpected"),
    "tie to nothing": (lambda p: edit_in(p, "tensors", "0.weight", {"same": "zzz"}), "'0.weight' is unexpected"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    spoil, message = BAD[name]
    model, _, build = make("convnet")
    path = tmp_path / "m"
    save(model, path)
    spoil(path)
    with pytest.raises(ValueError, match=message) as caught:
        load(path, build)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")


def test_where_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load(tmp_path / "nowhere", convnet)
    with pytest.raises(ValueError, match="there is no such file"):
        load(tmp_path, convnet)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="a file, not a directory"):
        load(tmp_path / "file", convnet)
    save(convnet(), tmp_path / "m")
    (tmp_path / "m" / T).unlink()
    with pytest.raises(FileNotFoundError, match=f"{T} does not exist"):
        load(tmp_path / "m", convnet)


def narrow() -> nn.Module:
    model: Any = convnet()
    model[6] = nn.Linear(108, 9)
    return model


def biased() -> nn.Module:
    model: Any = convnet()
    model[0].register_parameter("more", nn.Parameter(torch.ones(1)))
    return model


def deeper() -> nn.Module:
    model: Any = convnet()
    model.append(nn.ReLU())
    return model


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (narrow, ValueError, r"'6.weight' is \[10, 108\], which no part of build's \[9, 108\] is"),
        (biased, ValueError, "tensor '0.more' is missing"),
        (deeper, ValueError, "build made a module '7'"),
        (Tied, ValueError, "the model is a Sequential, and build made a Tied"),
        (lambda: 3, TypeError, "made a int"),
    ],
)
def test_other_code_is_refused(build: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    save(make("convnet")[0], tmp_path / "m")
    with pytest.raises(error, match=message):
        load(tmp_path / "m", build)


# export


class Dictionary(nn.Module):
    """Named inputs, outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Gather(nn.Linear(2, 3), -1, torch.tensor([0, 3]))

    def forward(self, a: Tensor, b: Tensor | None = None) -> Any:
        y = self.layer(a)
        return {"y": y, "pair": Pair(y.argmax(-1), None), "b": None if b is None else b * 2}


def repeat(x: Tensor, batch: int) -> Tensor:
    return x[torch.arange(batch) % len(x)]


# by keyword, and in another order than forward's
NAMED = {"b": torch.randn(2, 2), "a": torch.randn(2, 4)}
EXPORTED: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{n: (lambda n=n: make(n)[:2]) for n in ("lstm", "gather and low rank", "attention")},
    "batch of one": lambda: (make("convnet")[0], torch.randn(1, 3, 8, 8)),
    "named": lambda: (Dictionary(), NAMED),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [torch.randn(2, 5, 8)]),
}


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_an_exported_file_computes_the_same(name: str, format: str, tmp_path: Path) -> None:
    import onnxruntime

    torch.manual_seed(0)
    model, inputs = EXPORTED[name]()
    model.train()
    next(model.children()).eval()
    modes = [m.training for m in model.modules()]
    path = export(model, tmp_path / f"m.{format}", inputs, format)
    assert path == tmp_path / f"m.{format}"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert [m.training for m in model.modules()] == modes
    assert not model._forward_hooks
    assert torch.backends.mha.get_fastpath_enabled()
    model.eval()
    for batch in (1, 2, 5):  # sizes that no check has seen
        rows = partial(repeat, batch=batch)
        args, kwargs = tree_map(rows, export_module._arguments(inputs))
        expected = [x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor)]
        if format == "pt2":
            tree = torch.export.load(path).module()(*args, **kwargs)
            found = [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
        else:
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            given = kwargs or dict(zip([x.name for x in session.get_inputs()], args, strict=True))
            found = [torch.as_tensor(y) for y in session.run(None, {k: x.numpy() for k, x in given.items()})]
        assert len(found) == len(expected)
        for x, y in zip(expected, found, strict=True):
            assert torch.allclose(x, y, atol=1e-4)


def test_a_model_of_transformers_exports_and_its_file_needs_none(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
    )
    model = transformers.BertForMaskedLM(config)
    words = torch.randint(0, 30, (2, 6))
    assert export(model, tmp_path / "m.onnx", {"input_ids": words}).is_file()
    export(model, tmp_path / "m.pt2", words, "pt2")
    # no class of transformers: a dictionary
    assert type(torch.export.load(tmp_path / "m.pt2").module()(words)) is dict
    # its tied weights, too
    save(model, tmp_path / "m")
    back = load(tmp_path / "m", lambda: transformers.BertForMaskedLM(config))
    assert torch.equal(back(words).logits, model.eval()(words).logits)
    assert back.cls.predictions.decoder.weight is back.bert.embeddings.word_embeddings.weight


def test_weights_too_large_for_protobuf_lie_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(export_module, "ONE_FILE", 0)
    model, x = nn.Linear(64, 64), torch.randn(2, 64)
    export(model, tmp_path / "m.onnx", x, dynamic_batch=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    (y,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"input": x.numpy()})
    assert torch.allclose(torch.as_tensor(y), model(x), atol=1e-5)


def test_safetensors_is_save(tmp_path: Path) -> None:
    model, x, build = make("convnet")
    assert export(model, tmp_path / "m", x, format="safetensors") == tmp_path / "m"
    assert torch.equal(load(tmp_path / "m", build)(x), model(x))


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] // 2, 2, -1) if x.shape[0] % 2 == 0 else x


def test_a_batch_of_one_size(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"(?s)FixedBatch cannot be exported as pt2: .*dynamic_batch=False"):
        export(FixedBatch(), tmp_path / "m.pt2", x, "pt2")
    assert not any(tmp_path.iterdir())
    export(FixedBatch(), tmp_path / "m.pt2", x, "pt2", dynamic_batch=False)
    assert torch.equal(torch.export.load(tmp_path / "m.pt2").module()(x), FixedBatch()(x))


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_a_file_that_computes_something_else_is_not_written(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"m.{format}"
    path.write_text("what was there")
    run = export_module._run
    monkeypatch.setattr(export_module, "_run", lambda *a: [[y * 1.001 for y in ys] for ys in run(*a)])
    with pytest.raises(RuntimeError, match=r"failed its check .* differs from the model by 1\.0e-03"):
        export(nn.Linear(3, 2), path, torch.randn(2, 3), format)
    assert path.read_text() == "what was there"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("expected", "found", "gap"),
    [
        ([[1.0, 4.0]], [[1.0, 4.4]], 0.1),
        ([[float("inf"), 1.0]], [[float("inf"), 1.0]], 0.0),
        ([[1.0, 1.0]], [[float("nan"), 1.0]], float("inf")),
        ([[0.0], [8.0]], [[0.8], [8.0]], 0.1),
        ([[], [0.0]], [[], [0.0]], 0.0),
    ],
)
def test_the_difference_is_of_the_largest_output(expected: Any, found: Any, gap: float) -> None:
    measured, allowed = export_module._difference(*([torch.tensor(x) for x in xs] for xs in (expected, found)))
    assert measured == pytest.approx(gap)
    assert allowed == 1e-4


def test_outputs_of_other_shapes_differ() -> None:
    with pytest.raises(RuntimeError, match=r"shapes \[\[2\]\], not \[\[1\]\]"):
        export_module._difference([torch.ones(1)], [torch.ones(2)])


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "torch-espalier\[onnx\]"'):
        export(nn.Linear(3, 2), tmp_path / "m.onnx", torch.randn(2, 3))


def test_paths_and_formats_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'onnx', 'pt2', 'safetensors', not 'tflite'"):
        export(nn.Linear(3, 2), tmp_path / "m", torch.randn(2, 3), "tflite")
    with pytest.raises(IsADirectoryError, match="Give the name of a file"):
        export(nn.Linear(3, 2), tmp_path, torch.randn(2, 3), "pt2")
