"""Heads in the exact layout of each family: found by their tensors, loaded with their target, computed as written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_families as families
import mlx.core as mx
import numpy as np
import pytest
from head_families import FAMILIES, QWEN, hidden_states, qwen_experts_apart, write
from heads import Reference, drafted, softmax
from mlx.utils import tree_flatten

import localspec
from localspec.drafters import MTPDrafter
from localspec.drafters.protocol import Draw, UnreadProposal
from localspec.engine import Engine
from localspec.errors import IncompatibleDrafterError, IncompleteModelError
from localspec.models import mtp
from localspec.noise import Noise
from localspec.settings import Settings

PROMPT = [10, 20, 30, 10, 20, 99, 7, 31, 200, 11]


class Case:
    """One family, loaded once by the public way."""

    def __init__(self, name: str, folder: Path) -> None:
        from head_families import build

        self.family = FAMILIES[name]
        model = build(self.family.target)
        self.head = self.family.make(model)
        self.folder = write(folder, self.family.target, self.head)
        self.engine = localspec.load(folder, dtype="float32")
        self.model = self.engine.model

    def reference(self, *faults: str) -> Reference:
        return self.family.reference(self.model, self.head, faults)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("model") / "model")


def _propose(engine: Engine, length: int, **settings: Any) -> UnreadProposal:
    session = engine.new_session()
    session.prepare(PROMPT)
    drafter = next(d for d in session.drafters if isinstance(d, MTPDrafter))
    proposal = drafter.propose(length, Draw(Settings(**settings), Noise(1), session.target.vocabulary_size))
    assert proposal is not None
    return proposal


def _furthest(engine: Engine, reference: Reference, *, before_norm: bool = False) -> list[float]:
    """The largest difference between q and the reference's softmax, at each of three depths."""
    proposal = _propose(engine, 3, temperature=1.0, accept="rejection")
    assert proposal.q is not None
    before, after = hidden_states(engine.model, PROMPT[:-1])
    expected = reference.follow([before if before_norm else after], PROMPT, proposal.tokens)
    return [
        float(np.abs(np.array(q, np.float64) - softmax(logits)).max())
        for q, logits in zip(proposal.q, expected, strict=True)
    ]


def test_it_comes_with_the_model_and_drafts_as_its_layout_says(case: Case) -> None:
    assert [drafter.name for drafter in case.engine.drafters] == ["ngram", "mtp"]
    assert max(_furthest(case.engine, case.reference())) < 2e-5
    _, after = hidden_states(case.model, PROMPT[:-1])
    assert _propose(case.engine, 3).tokens == drafted(case.reference(), [after], PROMPT, 3)


def test_each_planted_mistake_is_seen(case: Case) -> None:
    """Norm weights shifted once more, the halves the other way round, the hidden state before the last norm."""
    assert _furthest(case.engine, case.reference("norms"))[0] > 1e-3
    assert _furthest(case.engine, case.reference("concat"))[0] > 1e-3
    assert _furthest(case.engine, case.reference(), before_norm=True)[0] > 1e-3
    if case.family.target in ("deepseek_v3", "glm4_moe"):
        wrong = _furthest(case.engine, case.reference("onward"))
        assert wrong[0] < 2e-5
        assert wrong[1] > 1e-5


def test_the_hidden_state_may_be_another_one(case: Case) -> None:
    """For a checkpoint that was trained otherwise than its family."""
    source = mtp.find(case.folder)
    assert source is not None
    engine = Engine(case.model, drafters=[MTPDrafter(mtp.load_head(source, case.model, hidden="before-norm"))])
    assert max(_furthest(engine, case.reference(), before_norm=True)) < 2e-5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_are_those_of_plain_decoding(case: Case, temperature: float) -> None:
    engine = Engine(case.model, drafters=[MTPDrafter(case.engine.drafters[-1].head)])  # type: ignore[attr-defined]
    session = engine.new_session()
    context = list(PROMPT)
    for turn, length in enumerate((1, 2, 3)):
        settings: dict[str, Any] = {"max_tokens": 12, "temperature": temperature, "seed": turn, "exact": "off"}
        plain = engine.generation(engine.new_session(), context, Settings(speculate=False, **settings)).run()
        fast = engine.generation(session, context, Settings(draft_length=length, **settings)).run()
        assert fast.ids == plain.ids
        assert fast.stats.drafted > 5
        context += [*fast.ids, 3 + turn]


def test_it_is_found_by_its_tensors(case: Case, tmp_path: Path) -> None:
    source = mtp.find(case.folder)
    assert source is not None
    assert source.tensors.keys() == case.head.keys()
    assert source.bytes == sum(array.nbytes for array in case.head.values())
    without = write(tmp_path / "without", case.family.target, {})
    config = json.loads((without / "config.json").read_text())
    (without / "config.json").write_text(
        json.dumps(config | {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1})
    )
    assert mtp.find(without) is None
    assert [drafter.name for drafter in localspec.load(without, dtype="float32").drafters] == ["ngram"]


def test_it_may_stand_alone(case: Case, tmp_path: Path) -> None:
    """A target without it, and a folder or a file with nothing else."""
    without = write(tmp_path / "without", case.family.target, {})
    alone = tmp_path / "head"
    alone.mkdir()
    mx.save_safetensors(str(alone / "some-name.safetensors"), case.head)
    for place in (alone, alone / "some-name.safetensors"):
        engine = localspec.load(without, mtp=place, dtype="float32")
        assert max(_furthest(engine, case.reference())) < 2e-5


def test_a_head_without_a_tensor_is_refused(case: Case, tmp_path: Path) -> None:
    gone = next(name for name in case.head if name.endswith("o_proj.weight"))
    folder = write(tmp_path / "m", case.family.target, {n: w for n, w in case.head.items() if n != gone})
    with pytest.raises(IncompleteModelError, match=r"o_proj\.weight is missing") as caught:
        localspec.load(folder, mtp=folder, dtype="float32")
    assert "\n" not in str(caught.value)


def test_quantized_heads_stay_as_they_are_where_the_target_is(case: Case, tmp_path: Path) -> None:
    """MLX's triples, with a quantized target: the head computes with the rounded weights."""
    packed, rounded = {}, dict(case.head)
    for name, array in case.head.items():
        plain = array.ndim == 2 and not any(part in name for part in ("gate.weight", "kv_b", "embed", "head.", "gate_"))
        if name.endswith(".weight") and plain and array.shape[-1] % 32 == 0:
            stem = name.removesuffix("weight")
            parts = mx.quantize(array, group_size=32, bits=8)
            packed |= dict(zip((name, f"{stem}scales", f"{stem}biases"), parts, strict=True))
            rounded[name] = mx.dequantize(*parts, group_size=32, bits=8)
        else:
            packed[name] = array
    assert len(packed) > len(case.head)
    folder = write(tmp_path / "m", case.family.target, packed)
    reference = case.family.reference(case.model, rounded)
    assert max(_furthest(localspec.load(folder, dtype="float32"), reference)) < 2e-5
    _quantize_target(folder)
    engine = localspec.load(folder, dtype="quantized")
    head = engine.drafters[-1].head  # type: ignore[attr-defined]
    assert any("scales" in name for name, _ in tree_flatten(head.parameters()))
    assert len(_propose(engine, 3).tokens) == 3


def _quantize_target(folder: Path) -> None:
    """Pack one projection of the first layer, and have the config say so."""
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    own = [n for n in weights if "layers.0." in n and "mtp" not in n and n.endswith("proj.weight")]
    name = next(n for n in own if weights[n].ndim == 2 and weights[n].shape[-1] % 32 == 0)
    stem = name.removesuffix(".weight")
    parts = mx.quantize(weights[name], group_size=32, bits=8)
    weights |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 8}}))


# Spellings of Qwen's.


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("qwen3-next", tmp_path_factory.mktemp("moe") / "model")


def _shifted(head: dict[str, mx.array], names: tuple[str, ...] = ("",)) -> dict[str, mx.array]:
    return {n: w + 1 if w.ndim == 1 and any(part in n for part in names) else w for n, w in head.items()}


def test_norms_are_factors_whichever_way_they_are_stored(moe: Case, tmp_path: Path) -> None:
    """Zero-centred throughout, shifted throughout, and as two converters left them: the block's shifted and the last
    one not, or the other way round."""
    spellings = {
        "shifted": _shifted(moe.head),
        "last alone": _shifted(moe.head, ("mtp.norm.",)),
        "all but the last": _shifted(moe.head, ("layers.0.", "pre_fc")),
    }
    for name, head in spellings.items():
        folder = write(tmp_path / name, moe.family.target, head)
        assert max(_furthest(localspec.load(folder, dtype="float32"), moe.reference())) < 2e-5, name


def test_small_factors_in_front_go_with_the_block(moe: Case, tmp_path: Path) -> None:
    """Factors of 0.3 in front of fc, stored shifted: their own mean would tell the wrong thing."""
    head = dict(moe.head)
    for name in (f"{QWEN}pre_fc_norm_hidden.weight", f"{QWEN}pre_fc_norm_embedding.weight"):
        head[name] = head[name] * 0.1 - 0.7
    reference = moe.family.reference(moe.model, head)
    for number, stored in enumerate((head, _shifted(head))):
        folder = write(tmp_path / str(number), moe.family.target, stored)
        assert max(_furthest(localspec.load(folder, dtype="float32"), reference)) < 2e-5


def test_experts_may_be_stored_one_by_one(moe: Case, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", moe.family.target, qwen_experts_apart(moe.head))
    assert max(_furthest(localspec.load(folder, dtype="float32"), moe.reference())) < 2e-5


def test_prefixes_and_copies_do_not_matter(moe: Case, tmp_path: Path) -> None:
    """`language_model.mtp.*`, and bare names with a copy of the embedding, as some repositories have them."""
    wrapped = {f"language_model.{name}": array for name, array in moe.head.items()}
    bare = {name.removeprefix(QWEN): array for name, array in moe.head.items()} | {
        "embed_tokens.weight": mx.ones((4, 4))
    }
    without = write(tmp_path / "without", moe.family.target, {})
    for number, head in enumerate((wrapped, bare)):
        mx.save_safetensors(str(tmp_path / f"{number}.safetensors"), head)
        engine = localspec.load(without, mtp=tmp_path / f"{number}.safetensors", dtype="float32")
        assert max(_furthest(engine, moe.reference())) < 2e-5


# Pairs that do not fit.


def test_a_head_of_another_family_is_refused(tmp_path: Path) -> None:
    folders = {}
    for name in ("qwen3.5", "glm-4.5", "mimo"):
        from head_families import build

        family = FAMILIES[name]
        mx.save_safetensors(str(tmp_path / f"{name}.safetensors"), family.make(build(family.target)))
        folders[name] = write(tmp_path / name, family.target, {})
    for target, head in (("qwen3.5", "glm-4.5"), ("glm-4.5", "mimo"), ("mimo", "qwen3.5")):
        with pytest.raises(IncompatibleDrafterError, match="target") as caught:
            localspec.load(folders[target], mtp=tmp_path / f"{head}.safetensors", dtype="float32")
        assert "\n" not in str(caught.value)


def test_matrices_of_its_own_are_used_where_they_are_others(tmp_path: Path) -> None:
    """DeepSeek's copies of embedding and output matrix are the target's. Where they were trained apart, they count."""
    case = Case("deepseek-v3", tmp_path / "copies")
    assert "embed_tokens" not in case.engine.drafters[-1].head  # type: ignore[attr-defined]
    head = dict(case.head)
    own = {}
    for name in head:
        if name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
            own[name] = head[name] = mx.random.normal(head[name].shape, key=mx.random.key(len(own)))
    engine = localspec.load(write(tmp_path / "own", case.family.target, head), dtype="float32")
    reference = case.reference()
    assert min(_furthest(engine, reference)) > 1e-3
    embedding, output = (np.array(array, np.float64) for array in own.values())
    reference.embedding, reference.output = embedding, output
    assert max(_furthest(engine, reference)) < 2e-5


# Gemma 4's assistant, which reads the target's keys and values.


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("gemma")
    target = write(folder / "target", families.GEMMA, {})
    return localspec.load(target, mtp=families.write_assistant(folder / "head", families.assistant()), dtype="float32")


def _gemma_furthest(engine: Engine, length: int, *faults: str, ids: list[int] | None = None) -> list[float]:
    """As `_furthest`, behind the first `length` tokens of an endless text."""
    context = [i * i * 7 % 250 for i in range(length)] if ids is None else ids
    session = engine.new_session()
    session.prepare(context)
    drafter = session.drafters[-1]
    proposal = drafter.propose(3, Draw(Settings(temperature=1.0, accept="rejection"), Noise(1), 258))
    assert proposal is not None
    assert proposal.q is not None
    kv = {}
    for kind, cache in zip(("sliding_attention", "full_attention"), session.transaction.caches, strict=True):
        parts = cache.keys_and_values() if kind == "sliding_attention" else (cache.keys, cache.values)
        both = [np.array(part[0], np.float64).swapaxes(0, 1) for part in parts]
        held = [part[: len(context) - 1] if kind == "full_attention" else part for part in both]
        window = -len(held[0]) if kind == "full_attention" else 1 - families.GEMMA_WINDOW
        kv[kind] = (held[0][window:], held[1][window:])
    reference = families.GemmaReference(engine.model, families.assistant(), faults)
    _, after = hidden_states(engine.model, context[:-1])
    expected = reference.follow(after[-1], context[-1], len(context) - 1, kv, proposal.tokens)
    return [
        float(np.abs(np.array(q, np.float64) - softmax(logits)).max())
        for q, logits in zip(proposal.q, expected, strict=True)
    ]


@pytest.mark.parametrize("length", [2, 5, 12, 13, 14, 40])
def test_the_assistant_reads_the_targets_keys_and_values(gemma: Engine, length: int) -> None:
    """Before its window is full, as it fills, and long after."""
    assert [drafter.name for drafter in gemma.drafters] == ["ngram", "mtp"]
    assert max(_gemma_furthest(gemma, length)) < 5e-5


@pytest.mark.parametrize("fault", ["scale", "concat"])
def test_mistakes_with_the_assistant_are_seen(gemma: Engine, fault: str) -> None:
    assert _gemma_furthest(gemma, 20, fault)[0] > 1e-3


def test_the_assistants_position_stays_while_drafts_are_made(gemma: Engine) -> None:
    assert _gemma_furthest(gemma, 20, "position")[0] < 5e-5
    assert max(_gemma_furthest(gemma, 20, "position")[1:]) > 2e-4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_with_the_assistant_are_those_of_plain_decoding(gemma: Engine, temperature: float) -> None:
    """Through its window, second turns and an edited one."""
    engine = Engine(gemma.model, drafters=[MTPDrafter(gemma.drafters[-1].head)])  # type: ignore[attr-defined]
    session, context = engine.new_session(), list(PROMPT)
    for turn, length in enumerate((1, 2, 3)):
        settings: dict[str, Any] = {"max_tokens": 15, "temperature": temperature, "seed": turn, "exact": "off"}
        plain = engine.generation(engine.new_session(), context, Settings(speculate=False, **settings)).run()
        fast = engine.generation(session, context, Settings(draft_length=length, **settings)).run()
        assert fast.ids == plain.ids
        assert fast.stats.drafted > 5
        context = [*context, *fast.ids, 3 + turn][: 30 if turn == 1 else None]
    drafter = session.drafters[-1]
    assert isinstance(drafter, MTPDrafter)


def test_an_assistant_without_its_config_is_refused(tmp_path: Path) -> None:
    target = write(tmp_path / "target", families.GEMMA, {})
    folder = families.write_assistant(tmp_path / "head", families.assistant())
    (folder / "config.json").unlink()
    with pytest.raises(IncompleteModelError, match=r"config\.json, with its text_config, is missing"):
        localspec.load(target, mtp=folder, dtype="float32")
    families.write_assistant(tmp_path / "head", families.assistant(), text_config={"num_hidden_layers": "many"})
    with pytest.raises(IncompleteModelError, match="does not fit"):
        localspec.load(target, mtp=folder, dtype="float32")
