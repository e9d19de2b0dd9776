"""Training in torch: the Llama against MLX's, the head against a slow one in numpy, its loss, going on. Skipped without
the extra `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama as mlx_llama
from mlx_lm.models.cache import make_prompt_cache
from tiny import _scaled

torch = pytest.importorskip("torch")

from localspec.errors import UnsupportedModelError  # noqa: E402
from localspec.train.block import Head, head_of, new_head  # noqa: E402
from localspec.train.decoding import Sampling, decode  # noqa: E402
from localspec.train.examples import Example  # noqa: E402
from localspec.train.head import Plan, train  # noqa: E402
from localspec.train.head_file import HeadShape  # noqa: E402
from localspec.train.lessons import Judge, Lesson, batches, collate, epoch  # noqa: E402
from localspec.train.material import Material  # noqa: E402
from localspec.train.states import States  # noqa: E402
from localspec.train.torch_llama import TorchLlama  # noqa: E402

VOCABULARY, LAYERS = 96, 4
SHAPE = HeadShape((1, 3), 4, 2, 10000.0, 1e-5, 4, "abc")
PROMPTS = [[5, 6, 7, 8], [5, 6, 9], [5, 6, *range(10, 40)], [3]]


def tiny(**more: Any) -> Any:
    args = mlx_llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=LAYERS,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        **more,
    )
    return _scaled(mlx_llama.Model(args), 0, 2.0)


def test_torch_decodes_what_mlx_does() -> None:
    model = tiny()
    answers = decode(TorchLlama(model), PROMPTS, [Sampling(0.0, 1.0, ())] * 4, end_ids={11, 12}, most=40)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(mx.array([[*prompt, *answer[:-1]]]), cache=make_prompt_cache(model))[0, len(prompt) - 1 :]
        gaps = np.array(logits.max(axis=-1) - logits[mx.arange(len(answer)), mx.array(answer)])
        spread = float(mx.std(logits).item())
        assert gaps.max() < 0.1 * spread  # what bfloat16 may do at near-ties
        assert (gaps == 0).mean() > 0.8
        assert len(answer) == 40 or answer[-1] in {11, 12}


def test_hidden_states_are_those_behind_the_layers() -> None:
    model = tiny()
    ids = [[4, 5, 6, 7, 8, 9], [9, 8, 7, 0, 0, 0]]
    found = TorchLlama(model).taps(torch.tensor(ids), [1, 3]).float().numpy()
    assert found.shape == (2, 6, 2, 32)
    for row, length in ((0, 6), (1, 3)):
        x = model.model.embed_tokens(mx.array([ids[row][:length]]))
        for number, layer in enumerate(model.model.layers):
            x = layer(x, "causal", None)
            if number in (1, 3):
                wanted = np.array(x[0])
                assert np.abs(found[row, :length, (1, 3).index(number)] - wanted).max() < 0.03 * np.abs(wanted).max()


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="shared embeddings and plain RoPE"):
        TorchLlama(tiny(rope_scaling={"type": "linear", "factor": 2.0}))
    model = tiny()
    mx.eval(model)
    import mlx.nn as nn

    nn.quantize(model, group_size=32)
    with pytest.raises(UnsupportedModelError, match="load it with dtype float32"):
        TorchLlama(model)


def a_head(seed: int = 0) -> Head:
    torch.manual_seed(seed)
    head = Head(SHAPE, 32, 8, 48)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape) * (0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5))
            if weight.ndim == 1:
                weight.add_(1.0)
    return head


def one_by_one(head: Head, taps: np.ndarray, embeddings: np.ndarray, t: int, depth: int) -> list[np.ndarray]:
    """A chain of drafts begun at position t, the way a decoder makes it: pair after pair, with a cache of keys. In
    float64, written from the description in head_file."""
    w = {name: weight.numpy().astype(np.float64) for name, weight in head.state_dict().items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + 1e-5) * w[f"{name}.weight"]

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        angle = position * 10000.0 ** (-np.arange(4) / 4)
        a, b = x[:, :4], x[:, 4:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)

    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []

    def pair(hidden: np.ndarray, embedding: np.ndarray, position: int) -> np.ndarray:
        x = w["fc.weight"] @ np.concatenate(
            [norm(embedding, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
        )
        y = norm(x, "layers.0.input_layernorm")
        q, k, v = ((w[f"layers.0.self_attn.{name}_proj.weight"] @ y).reshape(-1, 8) for name in ("q", "k", "v"))
        keys.append(turned(k, position))
        values.append(v)
        said = []
        for h, query in enumerate(turned(q, position)):
            scores = np.array([query @ key[h // 2] for key in keys]) / np.sqrt(8)
            weights = np.exp(scores - scores.max())
            said.append(sum(a * value[h // 2] for a, value in zip(weights / weights.sum(), values, strict=True)))
        x = x + w["layers.0.self_attn.o_proj.weight"] @ np.concatenate(said)
        y = norm(x, "layers.0.post_attention_layernorm")
        gate, up = (w[f"layers.0.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return norm(x + w["layers.0.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up), "norm")

    found = []
    for position in range(t + 1):
        parts = [norm(taps[position, n], f"tap_norms.{n}") for n in range(2)]
        hidden = pair(w["fuse.weight"] @ np.concatenate(parts), embeddings[position + 1], position)
    found.append(hidden)
    for d in range(1, depth):
        hidden = pair(hidden, embeddings[t + 1 + d], t + d)
        found.append(hidden)
    return found


def test_drafts_of_a_whole_text_are_those_made_one_by_one() -> None:
    head = a_head()
    draws = np.random.default_rng(1)
    taps, embeddings = draws.normal(size=(2, 9, 2, 32)), draws.normal(size=(2, 9, 32))
    with torch.inference_mode():
        found = head.drafts(torch.tensor(taps).float(), torch.tensor(embeddings).float(), 3)
    assert [tuple(rows.shape) for rows in found] == [(2, 7, 32), (2, 6, 32), (2, 5, 32)]
    for text in range(2):
        for t in range(5):
            for d, wanted in enumerate(one_by_one(head, taps[text], embeddings[text], t, 3)):
                assert np.abs(found[d][text, t].numpy() - wanted).max() < 1e-4, (text, t, d)


def lessons(count: int, folder: Path, llama: TorchLlama) -> list[Lesson]:
    draws = np.random.default_rng(2)
    examples = [
        Example("own", tuple(draws.integers(0, VOCABULARY, 12 + n % 7).tolist()), 4, 0.0, n % 5 == 0)
        for n in range(count)
    ]
    states = States(folder, SHAPE.taps)
    states.make(llama, 0, examples)
    return [Lesson(example, found) for example, found in zip(examples, states.open(0, examples), strict=True)]


def test_states_on_disk_are_each_example_s_own(tmp_path: Path) -> None:
    llama = TorchLlama(tiny())
    for lesson in lessons(9, tmp_path, llama):
        wanted = llama.taps(torch.tensor([lesson.example.tokens]), SHAPE.taps)[0].float().numpy()
        got = torch.from_numpy(lesson.states.copy()).view(torch.bfloat16).float().numpy()
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max() < 0.03 * np.abs(wanted).max()


def test_the_loss_is_the_cross_entropy_with_the_target(tmp_path: Path) -> None:
    llama = TorchLlama(tiny())
    head = a_head()
    ids = np.arange(0, VOCABULARY, 2, dtype=np.int32)
    batch = collate(lessons(3, tmp_path, llama))
    judge = Judge(llama, ids)
    loss = judge.loss(head, batch, (1.0, 0.5))
    loss.backward()
    got = {name: weight.grad.clone() for name, weight in head.named_parameters()}
    head.zero_grad()
    rows = llama.weights["embed_tokens.weight"][torch.from_numpy(ids.astype(np.int64))]
    wanted = torch.zeros(())
    for depth, said in enumerate(head.drafts(batch.taps, llama.embed(batch.ids), 2)):
        losses = []
        for text in range(3):
            for t in range(3, int(batch.lengths[text]) - 2 - depth):  # prompts have four tokens
                target = (rows @ llama.normed(batch.taps[text, t + 1 + depth, -1])).softmax(-1)
                losses.append(-(target * (rows @ said[text, t]).log_softmax(-1)).sum())
        wanted = wanted + torch.stack(losses).mean() * (1.0, 0.5)[depth]
    wanted.backward()
    assert abs(loss.item() - wanted.item()) < 0.03 * wanted.item()
    for name, weight in head.named_parameters():
        assert torch.linalg.norm(got[name] - weight.grad) < 0.1 * torch.linalg.norm(weight.grad), name


def test_what_is_right(tmp_path: Path) -> None:
    llama = TorchLlama(tiny())
    head = a_head()
    ids = np.arange(0, VOCABULARY, 2, dtype=np.int32)
    batch = collate(lessons(6, tmp_path, llama))
    right = Judge(llama, ids).right(head, batch, 2)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        said = head.drafts(batch.taps, llama.embed(batch.ids), 2)
    rows = llama.weights["embed_tokens.weight"][torch.from_numpy(ids.astype(np.int64))]
    # The texts are random, so nothing is right: have each text say what the head does.
    for depth in range(2):
        likeliest = ids[(said[depth].float() @ rows.T).argmax(-1).numpy()]
        goes_on = batch.ids[:, 2 + depth :].numpy() == likeliest
        got = right[depth][:, : goes_on.shape[1]].numpy()
        assert not got[~goes_on].any()
        assert not got[~batch.counts(depth).numpy()].any()
    first = ids[(said[0].float() @ rows.T).argmax(-1).numpy()]
    for text in range(6):
        for t in range(3, int(batch.lengths[text]) - 2):
            changed = batch.ids.clone()
            changed[text, t + 2] = int(first[text, t])
            assert Judge(llama, ids).right(head, type(batch)(changed, batch.taps, batch.starts, batch.lengths), 1)[0][
                text, t
            ]


def test_a_new_head_is_the_target_s_last_layer() -> None:
    llama = TorchLlama(tiny())
    head = new_head(SHAPE, llama, 80)
    assert torch.equal(
        head.state_dict()["layers.0.self_attn.q_proj.weight"], llama.weights["layers.3.self_attn.q_proj.weight"]
    )
    assert torch.equal(
        head.state_dict()["layers.0.mlp.up_proj.weight"][:64], llama.weights["layers.3.mlp.up_proj.weight"]
    )
    assert head.state_dict()["layers.0.mlp.down_proj.weight"].shape == (32, 80)


def test_batches_hold_every_text_once() -> None:
    lengths = [5 + (7 * n) % 40 for n in range(200)]
    chosen = epoch(lengths, 128, "a")
    assert sorted(n for batch in chosen for n in batch) == list(range(200))
    assert all(len(batch) * max(lengths[n] for n in batch) <= 128 for batch in chosen)
    assert epoch(lengths, 128, "a") == chosen != epoch(lengths, 128, "b")


def test_training_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    llama = TorchLlama(tiny())
    found = lessons(20, tmp_path, llama)
    material = Material([x for x in found if not x.example.held_out], [x for x in found if x.example.held_out])
    judge = Judge(llama, np.arange(0, VOCABULARY, 2, dtype=np.int32))
    monkeypatch.setattr("localspec.train.head._SAVE", 5)

    def trained(name: str, *stops: int) -> Head:
        for stop in stops:
            torch.manual_seed(0)
            head = new_head(SHAPE, llama, 64)
            plan = Plan(20, 64, 1e-2)
            train(head, judge, material, plan, tmp_path / name, until=stop)
        return head

    whole, parts = trained("whole", 20), trained("parts", 5, 20)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, parts.state_dict()[name]), name
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split(":")[0] for line in said[:4]] == [f"step {n} of 20" for n in (5, 10, 15, 20)]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said[:4]]
    assert losses[-1] < losses[0]
    assert head_of(SHAPE, {name: w.numpy() for name, w in whole.state_dict().items()}).shape == SHAPE
    assert next(batches(found, 64, 0, skip=2)).ids.tolist() != next(batches(found, 64, 0)).ids.tolist()
