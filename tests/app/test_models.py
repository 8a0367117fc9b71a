"""Each model has the shape, the size and the equations that it claims, learns in all its parts, and can be shrunk."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier
from espalier.app.errors import Problem
from espalier.app.models import MODELS
from espalier.app.models.simmim import random_mask, simmim_loss, vit_mim
from espalier.app.models.tacotron2 import OVER, LocationAttention, Tacotron2
from espalier.app.models.transformer_xl import AdaptiveSoftmax, RelativeAttention, TransformerXL, relative_shift

XL: dict[str, Any] = {
    "vocab": 50, "layers": 2, "d_model": 16, "heads": 2, "d_head": 6, "d_inner": 24, "memory": 8,
    "cutoffs": [20, 30, 60],
}  # fmt: skip
SPEECH: dict[str, Any] = {
    "symbols": 12, "mels": 6, "embedding": 10, "encoder_channels": 16, "prenet": 12, "attention_rnn": 14,
    "decoder_rnn": 18, "attention": 8, "location_filters": 4, "location_kernel": 5, "postnet_channels": 10,
}  # fmt: skip


def speech_inputs() -> tuple[Tensor, ...]:
    """Texts as long as each other, so that nothing is packed."""
    return torch.randint(12, (2, 5)), torch.tensor([5, 5]), torch.randn(2, 6, 7), torch.tensor([7, 4])


@dataclass(frozen=True)
class Case:
    """A small model by name, what it is given and gives, and what may be zeroed: columns of these weights."""

    name: str
    options: dict[str, Any]
    inputs: Callable[[], tuple[Any, ...]]
    outputs: list[tuple[int, ...]]
    zeroed: dict[str, int] = field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[self.name](**self.options)


def images(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape),)


CASES = [
    Case("logreg", {"inputs": 12, "classes": 3}, images(4, 1, 3, 4), [(4, 3)]),
    Case("mlp", {"sizes": [12, 9, 8, 3]}, images(4, 1, 3, 4), [(4, 3)], {"3.weight": 4, "5.weight": 3}),
    Case(
        "convnet", {"width": 8}, images(4, 1, 8, 8), [(4, 10)],
        {"features.1.0.weight": 3, "features.2.0.weight": 5, "head.weight": 6},
    ),
    Case("vgg19", {"width": 0.0625, "classes": 7}, images(2, 3, 32, 32), [(2, 7)], {"features.17.weight": 3}),
    Case("resnet50", {"width": 4}, images(2, 3, 16, 16), [(2, 10)], {"layers.0.body.2.0.weight": 2}),
    Case(
        "transformer-xl", XL, lambda: (torch.randint(50, (2, 7)),), [(2, 7, 50), (2, 7, 16), (2, 7, 16)],
        {"layers.0.inner.3.weight": 10, "layers.1.inner.3.weight": 4},
    ),
    Case(
        "tacotron2", SPEECH, speech_inputs, [(2, 6, 7), (2, 6, 7), (2, 7), (2, 7, 5)],
        {
            "prenet.second.weight": 5, "encoder.convs.convs.1.weight": 6, "postnet.convs.2.weight": 4,
            "encoder.lstm.weight_ih_l0": 3, "encoder.lstm.weight_ih_l0_reverse": 3,
            "decoder.attention.location.weight": 2, "decoder.attention.score.weight": 3,
        },
    ),
    Case(
        "vit-mim", {"image": 8, "hidden": 16, "heads": 2, "layers": 2, "inner": 24},
        lambda: (torch.randn(2, 3, 8, 8), torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0]]).bool()), [(2, 3, 8, 8)],
        {"network.vit.layers.0.mlp.fc2.weight": 10, "network.vit.layers.1.mlp.fc2.weight": 3},
    ),
]  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])


def tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for part in out for t in tensors(part)]


def xl(**changed: Any) -> TransformerXL:
    torch.manual_seed(0)
    model = TransformerXL(**(XL | changed)).double().eval()
    for p in model.parameters():  # far from the start, where all words are as likely and distances hardly matter
        nn.init.normal_(p, std=0.3)
    return model


def speech(**changed: Any) -> Tacotron2:
    torch.manual_seed(0)
    return Tacotron2(**(SPEECH | changed)).double().eval()


# ---------------------------------------------------------------------------------------------------- all of them


def test_there_is_a_case_for_every_model() -> None:
    assert {c.name for c in CASES} == set(MODELS)


@each_case
def test_shapes(case: Case) -> None:
    assert [tuple(t.shape) for t in tensors(case.build()(*case.inputs()))] == case.outputs


@each_case
def test_gradients_reach_every_parameter(case: Case) -> None:
    model, inputs = case.build(), case.inputs()
    if case.name == "transformer-xl":
        inputs = (inputs[0], None, torch.arange(14).reshape(2, 7) * 3)  # words of every cluster
    sum((t * torch.randn_like(t)).sum() for t in tensors(model(*inputs)) if t.requires_grad).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.dim() < 2 or p.grad.any(), name  # a bias before batch norm has no effect


# Tacotron2: as published with 148 symbols. Transformer-XL: NVIDIA gives 192 M for this width. The others: torchvision's
# ResNet50, and VGG19's sixteen convolutions with one linear layer.
V, D, INNER = 267_735, 512, 2048
XL_LAYER = 5 * D * D + (D * INNER + INNER) + (INNER * D + D) + 2 * 2 * D
VIT_LAYER = 4 * (192 * 192 + 192) + (192 * 768 + 768) + (768 * 192 + 192) + 2 * 2 * 192


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("logreg", {}, 7_850),
        ("mlp", {}, 785 * 512 + 513 * 256 + 257 * 128 + 129 * 64 + 65 * 32 + 33 * 16 + 17 * 10),
        ("convnet", {}, 9 * (32 + 32 * 64 + 64 * 64) + 2 * (32 + 64 + 64) + 64 * 10 + 10),
        ("vgg19", {}, 20_040_522),
        ("resnet50", {}, 23_520_842),
        ("resnet50", {"classes": 1000, "imagenet": True}, 25_557_032),
        ("transformer-xl", {"vocab": V}, V * D + V + 3 * (D + 1) + 16 * XL_LAYER + 2 * D),
        ("tacotron2", {"symbols": 148}, 28_193_153),
        ("vit-mim", {}, (48 * 192 + 192) + 2 * 192 + 65 * 192 + 4 * VIT_LAYER + 2 * 192 + (192 * 48 + 48)),
    ],
)  # fmt: skip
def test_number_of_parameters(name: str, options: dict[str, Any], expected: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in MODELS[name](**options).parameters()) == expected


@each_case
def test_shrink_takes_zero_columns_out(case: Case) -> None:
    model, inputs = case.build().eval(), case.inputs()
    with torch.no_grad():
        for name, n in case.zeroed.items():
            model.get_parameter(name)[:, :n] = 0
    shrunk = espalier.shrink(model, inputs, latency=False, gather="never", low_rank=False)
    for name, n in case.zeroed.items():
        assert shrunk.model.get_parameter(name).shape[1] <= model.get_parameter(name).shape[1] - n, name
    for a, b in zip(tensors(model(*inputs)), tensors(shrunk.model(*inputs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_regularize_penalises_weights_of_layers_and_nothing_else() -> None:
    for name, without in (("tacotron2", ("embedding", "norms")), ("transformer-xl", ("embedding", "norm", "softmax"))):
        model = next(c for c in CASES if c.name == name).build()
        groups = espalier.regularize(model, espalier.GroupLasso(1e-3))
        found = {n for g in groups if "penalty" in g for n, _ in g["params"]}
        expected = {n for n, p in model.named_parameters() if p.dim() > 1 and not any(w in n for w in without)}
        assert found == expected - {"u", "v"}


def test_transformers_is_not_imported() -> None:
    code = "import sys, espalier.app.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp", {"sizes": [3]}, "sizes"),
        ("transformer-xl", XL | {"cutoffs": [30, 20]}, "cutoffs"),
        ("transformer-xl", XL | {"d_model": 15}, "d_model"),
        ("tacotron2", SPEECH | {"location_kernel": 4}, "location_kernel"),
        ("tacotron2", SPEECH | {"encoder_channels": 15}, "encoder_channels"),
        ("vit-mim", {"patch": 5}, "multiple of patch"),
        ("vit-mim", {"heads": 5}, "multiple of heads"),
    ],
)
def test_wrong_options_are_a_problem(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Problem, match=message):
        MODELS[name](**options)


# ---------------------------------------------------------------------------------------------------- images


def test_logreg_starts_at_zero() -> None:
    assert not any(p.any() for p in MODELS["logreg"]().parameters())


def test_convnet_learns_digits() -> None:
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = (x.float() / 16).view(-1, 1, 8, 8)
    train, test = torch.randperm(len(x)).split(1500)
    model = MODELS["convnet"](width=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(4):
        for batch in train[torch.randperm(1500)].split(64):
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (model.eval()(x[test]).argmax(1) == y[test]).float().mean() > 0.93


def test_masks_hide_as_many_patches_and_follow_the_generator() -> None:
    masks = [random_mask(50, 64, 0.6, torch.Generator().manual_seed(seed), "cpu") for seed in (0, 0, 1)]
    assert masks[0].dtype == torch.bool
    assert (masks[0].sum(1) == 39).all()
    assert masks[0].equal(masks[1])
    assert not masks[0].equal(masks[2])
    assert masks[0].unique(dim=0).shape[0] == 50
    assert masks[0].any(0).all()


def test_simmim_loss_is_the_mean_over_hidden_pixels() -> None:
    painted, image = torch.randn(2, 2, 3, 8, 8)
    mask = random_mask(2, 16, 0.3, torch.Generator().manual_seed(0), "cpu")
    wrong = [
        (painted[b, c, y, x] - image[b, c, y, x]).abs()
        for b in range(2) for c in range(3) for y in range(8) for x in range(8)
        if mask[b, 4 * (y // 2) + x // 2]
    ]  # fmt: skip
    torch.testing.assert_close(simmim_loss(painted, image, mask), torch.stack(wrong).mean())


def test_simmim_agrees_with_transformers_and_sees_no_hidden_patch() -> None:
    torch.manual_seed(0)
    model = vit_mim(image=8, patch=2, hidden=16, heads=2, layers=1, inner=16).eval()
    image, mask = torch.randn(2, 3, 8, 8), random_mask(2, 16, 0.5, torch.Generator().manual_seed(0), "cpu")
    painted = model(image, mask)
    theirs = model.network(pixel_values=image, bool_masked_pos=mask).loss
    torch.testing.assert_close(simmim_loss(painted, image, mask), theirs, rtol=1e-5, atol=1e-6)
    hidden = mask.reshape(2, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(model(image + 3 * hidden, mask), painted)
    assert not torch.allclose(model(image + 3 * ~hidden, mask), painted)


# ---------------------------------------------------------------------------------------------------- Transformer-XL


@pytest.mark.parametrize(("length", "before"), [(1, 0), (4, 0), (3, 5), (5, 2)])
def test_relative_shift(length: int, before: int) -> None:
    x = torch.randn(2, 3, length, before + length)
    y = relative_shift(x)
    assert y.shape == x.shape
    for i in range(length):
        for j in range(before + i + 1):  # token i, at before + i, sees j
            distance = before + i - j
            assert y[..., i, j].equal(x[..., i, before + length - 1 - distance])


def test_attention_is_the_formula_of_the_paper() -> None:
    torch.manual_seed(0)
    d, heads, d_head, length, before = 8, 2, 3, 4, 3
    layer = RelativeAttention(d, heads, d_head, 0.0).double()
    x, memory, r = (torch.randn(1, n, d).double() for n in (length, before, before + length))
    u, v = torch.randn(2, heads, 1, d_head).double()
    unseen = torch.ones(length, before + length).triu(before + 1).bool()
    got = layer(x, memory, r, u, v, unseen)[0]

    w_q, w_k, w_v = layer.qkv.weight.reshape(3, heads, d_head, d)
    w_r = layer.position.weight.reshape(heads, d_head, d)
    context = torch.cat([memory, x], 1)[0]
    for i in range(length):
        mixed = []
        for h in range(heads):
            q, scores, values = w_q[h] @ x[0, i], [], []
            for j in range(before + i + 1):
                k, distance = w_k[h] @ context[j], before + i - j
                place = w_r[h] @ r[0, before + length - 1 - distance]
                # A_ij = q·k + q·W_R R_{i−j} + u·k + v·W_R R_{i−j}
                scores.append((q @ k + q @ place + u[h, 0] @ k + v[h, 0] @ place) / math.sqrt(d_head))
                values.append(w_v[h] @ context[j])
            mixed.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
        torch.testing.assert_close(got[i], layer.out.weight @ torch.cat(mixed))


def test_positions_are_sines_and_cosines_of_the_distance() -> None:
    r = xl()._distances(5)[0]
    for row, distance in zip(r, (4, 3, 2, 1, 0), strict=True):
        angles = [distance / 10000 ** (2 * i / 16) for i in range(8)]
        expected = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])
        torch.testing.assert_close(row.float(), expected)


@pytest.mark.parametrize("layers", [1, 3])
def test_segments_with_memory_are_one_long_text(layers: int) -> None:
    model, tokens = xl(layers=layers, memory=20), torch.randint(50, (2, 12))
    whole, _ = model(tokens)
    memory, parts = None, []
    for part in tokens.split([5, 3, 4], 1):
        out, memory = model(part, memory)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    assert [m.shape for m in memory] == [(2, 12, 16)] * layers
    assert not any(m.requires_grad for m in memory)


def test_memory_is_as_long_as_asked() -> None:
    tokens = torch.randint(50, (2, 12))
    whole, _ = xl(layers=1)(tokens)
    for length in (0, 3):
        model = xl(layers=1, memory=length)
        _, memory = model(tokens[:, :6])
        assert memory[0].shape == (2, length, 16)
        torch.testing.assert_close(memory[0], 4.0 * model.embedding(tokens[:, 6 - length : 6]).detach())
        # with a shorter memory the next segment is another text
        assert not torch.allclose(model(tokens[:, 6:], memory)[0], whole[:, 6:])


def test_no_token_sees_a_later_one() -> None:
    model, tokens = xl(), torch.randint(50, (2, 9))
    _, memory = model(tokens[:, :3])
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 7) % 50
    a, b = (model(t[:, 3:], memory)[0] for t in (tokens, changed))
    assert a[:, :3].equal(b[:, :3])
    assert not torch.isclose(a[:, 3:], b[:, 3:]).all(-1).any()


@pytest.mark.parametrize("cutoffs", [[], [20], [20, 30, 60], [1, 2, 49, 50]])
def test_adaptive_softmax(cutoffs: list[int]) -> None:
    torch.manual_seed(0)
    softmax = AdaptiveSoftmax(50, 6, cutoffs).double()
    for p in softmax.parameters():
        nn.init.normal_(p)
    words, x = torch.randn(50, 6).double(), torch.randn(50, 6).double()
    logs = softmax.log_probabilities(x, words)
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(50).double())
    for targets in (torch.arange(50), torch.arange(49, -1, -1), torch.full((50,), 3)):
        nll = softmax.nll(x, words, targets)
        torch.testing.assert_close(nll, -logs.gather(1, targets[:, None])[:, 0])

    logits = x @ words.T + softmax.bias
    ends = [c for c in cutoffs if c < 50] + [50]
    clusters = x @ softmax.cluster_weight.T + softmax.cluster_bias
    total = logits[:, : ends[0]].exp().sum(1) + clusters.exp().sum(1)
    for word in range(50):
        if word < ends[0]:
            expected = logits[:, word].exp() / total
        else:
            i = next(i for i, end in enumerate(ends[1:]) if word < end)
            share = logits[:, word].exp() / logits[:, ends[i] : ends[i + 1]].exp().sum(1)
            expected = clusters[:, i].exp() / total * share
        torch.testing.assert_close(logs[:, word].exp(), expected)


def test_targets_give_what_the_log_probabilities_say() -> None:
    model, tokens, targets = xl(), torch.randint(50, (2, 9)), torch.randint(50, (2, 9))
    logs, a = model(tokens)
    nll, b = model(tokens, None, targets)
    torch.testing.assert_close(nll, -logs.gather(2, targets[..., None])[..., 0])
    assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_embedding_is_tied_and_scaled() -> None:
    model = xl()
    assert [n for n, p in model.named_parameters() if 50 in p.shape] == ["embedding.weight", "softmax.bias"]
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.tensor([[7]]))
    torch.testing.assert_close(seen[0][0, 0], 4.0 * model.embedding.weight[7])


def test_mixed_precision_gives_losses_in_float32() -> None:
    torch.manual_seed(0)
    model, tokens = TransformerXL(**XL).eval(), torch.randint(50, (2, 9))
    exact, _ = model(tokens, None, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        nll, memory = model(tokens, None, tokens)
        nll, _ = model(tokens, memory, tokens)
    assert nll.dtype == torch.float32
    nll.mean().backward()
    torch.testing.assert_close(nll, exact, rtol=0.05, atol=0.05)


# ---------------------------------------------------------------------------------------------------- Tacotron 2


def test_padding_changes_nothing() -> None:
    model = speech()
    for norm in (*model.encoder.convs.norms, *model.postnet.norms):
        nn.init.normal_(norm.running_mean)  # so that a padding of zeros does not stay zero by itself
    text, mel = torch.randint(12, (3, 7)), torch.randn(3, 6, 9).double()
    texts, mels = torch.tensor([4, 7, 1]), torch.tensor([9, 5, 2])
    together = model(text, texts, mel, mels)
    for i, (n, m) in enumerate(zip(texts.tolist(), mels.tolist(), strict=True)):
        alone = model(text[i, None, :n], texts[i, None], mel[i, None, :, :m], mels[i, None])
        first, after, gate, alignment = (t[i] for t in together)
        for got, expected in zip((first[:, :m], after[:, :m], gate[:m], alignment[:m, :n]), alone, strict=True):
            torch.testing.assert_close(got, expected[0], rtol=1e-9, atol=1e-9)
        assert not first[:, m:].any()
        assert not after[:, m:].any()
        assert (gate[m:] == OVER).all()
        assert not alignment[:, n:].any()


def test_a_frame_depends_on_those_before_alone() -> None:
    model, (text, texts, mel, _) = speech(), speech_inputs()
    changed = mel.clone()
    changed[:, :, 3] += 1
    a, b = (model(text, texts, m.double(), torch.tensor([7, 7])) for m in (mel, changed))
    assert a[0][..., :4].equal(b[0][..., :4])
    assert not torch.isclose(a[0][..., 4:], b[0][..., 4:]).any()


def test_location_attention_is_the_formula_of_the_paper() -> None:
    torch.manual_seed(0)
    attention = LocationAttention(5, 4, 7, 3, 5).double()
    query, memory, weights, total = (torch.randn(*s).double() for s in ((1, 5), (1, 6, 4), (1, 6), (1, 6)))
    padding = torch.tensor([[False] * 5 + [True]])
    got = attention(query, attention.keys(memory), weights, total, padding)
    energies = []
    for j in range(5):
        f = torch.zeros(3).double()
        for k in range(5):
            if 0 <= j + k - 2 < 6:
                f += attention.location_conv.weight[:, :, k] @ torch.stack([weights[0, j + k - 2], total[0, j + k - 2]])
        inner = attention.query.weight @ query[0] + attention.keys.weight @ memory[0, j] + attention.location.weight @ f
        energies.append(attention.score.weight[0] @ torch.tanh(inner))
    torch.testing.assert_close(got[0, :5], torch.softmax(torch.stack(energies), 0))
    assert got[0, 5] == 0


def test_attention_sees_its_last_weights_and_their_sum() -> None:
    model, (text, texts, mel, mels) = speech(), speech_inputs()
    seen: list[Tensor] = []
    model.decoder.attention.location_conv.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    alignments = model(text, texts, mel.double(), mels)[3]
    torch.testing.assert_close(alignments.sum(-1), torch.ones(2, 7).double())
    assert len(seen) == 7
    assert not seen[0].any()
    for t in range(1, 7):
        torch.testing.assert_close(seen[t], torch.stack([alignments[:, t - 1], alignments[:, :t].sum(1)], 1))


def test_dropout_follows_the_mode_and_stays_on_in_the_prenet_of_generate() -> None:
    model, (text, texts, mel, mels) = speech(), speech_inputs()
    mel = mel.double()
    assert model(text, texts, mel, mels)[1].equal(model(text, texts, mel, mels)[1])
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(model.generate(text, texts, 5, 1.0)[0])
    assert drawn[0].equal(drawn[1])
    assert not torch.allclose(drawn[0], drawn[2])
    model.train()
    assert not torch.allclose(model(text, texts, mel, mels)[0], model(text, texts, mel, mels)[0])


def test_generate_does_what_forward_does() -> None:
    model, (text, texts, mel, _) = speech(), speech_inputs()
    nn.init.zeros_(model.prenet.second.weight)  # the frame before, and its dropout, no longer matter
    out, lengths, alignments = model.generate(text, texts, 7, 1.0)
    expected = model(text, texts, mel.double(), torch.tensor([7, 7]))
    assert lengths.tolist() == [7, 7]
    torch.testing.assert_close(out, expected[1])
    torch.testing.assert_close(alignments, expected[3])


def test_generate_stops_at_the_gate() -> None:
    model, (text, texts, *_) = speech(), speech_inputs()
    nn.init.zeros_(model.prenet.second.weight)
    gates = torch.sigmoid(model(text, texts, torch.zeros(2, 6, 9).double(), torch.tensor([9, 9]))[2])
    for threshold in gates.flatten().tolist():  # equal to one of them, which is not above
        above = [[*(row > threshold).tolist(), True].index(True) + 1 for row in gates]
        out, lengths, _ = model.generate(text, texts, 9, threshold + 1e-12)
        assert lengths.tolist() == [min(n, 9) for n in above]
        assert out.shape[2] == max(lengths)
        assert not out[0, :, lengths[0] :].any()


def test_shrunk_tacotron2_still_packs_and_generates() -> None:
    model, inputs = speech(), speech_inputs()
    inputs = (*inputs[:2], inputs[2].double(), inputs[3])
    with torch.no_grad():
        model.encoder.lstm.weight_ih_l0[:, :3] = model.encoder.lstm.weight_ih_l0_reverse[:, :3] = 0
    ragged = (inputs[0], torch.tensor([5, 3]), *inputs[2:])
    small = espalier.shrink(model, inputs, latency=False, also=[ragged]).model
    out = []
    for m in (model, small):
        torch.manual_seed(0)
        out.append(m.generate(*ragged[:2], 4)[0])
    torch.testing.assert_close(*out)
