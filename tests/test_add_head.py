"""`localspec models add-head`: a head out of a checkpoint, beside a target, in the target's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_families as families
import mlx.core as mx
import numpy as np
import pytest
from head_families import FAMILIES, Family, build, hidden_states, write
from heads import softmax, target, write_own
from mlx.utils import tree_flatten
from scripted_engine import run

import localspec
from localspec import hub
from localspec.checkpoint import read_checkpoint
from localspec.drafters import MTPDrafter
from localspec.drafters.protocol import Draw, UnreadProposal
from localspec.engine import Engine
from localspec.errors import IncompleteModelError, LocalspecError
from localspec.loading import load_weights
from localspec.models import mtp
from localspec.noise import Noise
from localspec.settings import Settings

PROMPT = [10, 20, 30, 10, 20, 99, 7, 31, 200, 11]


def _propose(engine: Engine) -> UnreadProposal:
    session = engine.new_session()
    session.prepare(PROMPT)
    drafter = session.drafters[-1]
    assert isinstance(drafter, MTPDrafter)
    proposal = drafter.propose(3, Draw(Settings(temperature=1.0, accept="rejection"), Noise(1), 258))
    assert proposal is not None
    return proposal


def _furthest(engine: Engine, family: Family, head: dict[str, mx.array]) -> float:
    proposal = _propose(engine)
    assert proposal.q is not None
    _, after = hidden_states(engine.model, PROMPT[:-1])
    expected = family.reference(engine.model, head).follow([after], PROMPT, proposal.tokens)
    q = np.array(proposal.q, np.float64)
    return max(float(np.abs(a - softmax(b)).max()) for a, b in zip(q, expected, strict=True))


def _quantize(folder: Path) -> None:
    """Pack a target's matrices in 8 bits, as mlx-lm's converter does."""
    from mlx_lm.utils import quantize_model

    checkpoint = read_checkpoint(folder)
    model = load_weights(checkpoint, "quantized")
    model, config = quantize_model(model, dict(checkpoint.config), 32, 8)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["qwen3-next", "deepseek-v3", "glm-4.5", "mimo"])
def test_heads_are_stored_as_they_are_used(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    head = family.make(build(family.target))
    original = write(tmp_path / "original", family.target, head)
    converted = write(tmp_path / "converted", family.target, {})
    before = (converted / "model.safetensors").read_bytes()
    done = run("models", "add-head", str(original), str(converted))
    assert done.exit_code == 0, done.output
    assert str(converted / "mtp.safetensors") in done.stdout
    assert (converted / "model.safetensors").read_bytes() == before
    assert sorted(file.name for file in converted.iterdir() if "mtp" in file.name) == ["mtp.safetensors"]
    engine = localspec.load(converted, dtype="float32")
    assert [drafter.name for drafter in engine.drafters] == ["ngram", "mtp"]
    assert _furthest(engine, family, head) < 2e-5
    assert run("models", "add-head", str(original), str(converted)).exit_code == 0  # again: the same
    assert _furthest(localspec.load(converted, dtype="float32"), family, head) < 2e-5


@pytest.mark.parametrize("name", ["qwen3.5", "mimo"])
def test_heads_are_quantized_like_the_target(name: str, tmp_path: Path) -> None:
    """In its bits and groups; what comes of it is near to what the float head says, and is kept packed."""
    family = FAMILIES[name]
    head = family.make(build(family.target))
    original = write(tmp_path / "original", family.target, head)
    converted = write(tmp_path / "converted", family.target, {})
    _quantize(converted)
    assert run("models", "add-head", str(original), str(converted)).exit_code == 0
    engine = localspec.load(converted, dtype="quantized")
    packed = dict(tree_flatten(engine.drafters[-1].head.parameters()))  # type: ignore[attr-defined]
    matrix = "fc" if name == "qwen3.5" else "input_proj"
    assert packed[f"{matrix}.weight"].dtype == mx.uint32
    assert packed[f"{matrix}.scales"].shape == (32, 2)
    assert packed[f"{matrix}.weight"].shape == (32, 16)  # 64 inputs of 8 bits
    unpacked = localspec.load(converted, dtype="float32")
    assert 1e-6 < _furthest(unpacked, family, head) < 0.05
    a, b = _propose(engine).q, _propose(unpacked).q
    assert a is not None
    assert b is not None
    assert mx.allclose(a[0], b[0], atol=1e-3)


def test_the_assistant_of_gemma_4_takes_its_config_along(tmp_path: Path) -> None:
    original = families.write_assistant(tmp_path / "assistant", families.assistant())
    converted = write(tmp_path / "converted", families.GEMMA, {})
    separate = localspec.load(converted, mtp=original, dtype="float32")
    assert run("models", "add-head", str(original), str(converted)).exit_code == 0
    engine = localspec.load(converted, dtype="float32")
    assert _propose(engine).tokens == _propose(separate).tokens
    a, b = _propose(engine).q, _propose(separate).q
    assert a is not None
    assert b is not None
    assert mx.allclose(a, b, atol=1e-6)


def test_a_head_of_our_own_is_copied(tmp_path: Path) -> None:
    fits = lambda _, metadata: metadata.pop("vocabulary")  # noqa: E731
    write_own(tmp_path / "own.safetensors", families.build("mimo", 1), draft_ids=range(1, 60), change=fits)
    converted = write(tmp_path / "converted", "mimo", {})
    assert run("models", "add-head", str(tmp_path / "own.safetensors"), str(converted)).exit_code == 0
    assert (converted / "mtp.safetensors").read_bytes() == (tmp_path / "own.safetensors").read_bytes()


def test_a_head_of_our_own_for_another_model_is_refused(tmp_path: Path) -> None:
    converted = write(tmp_path / "converted", "mimo", {})
    (converted / "mtp.safetensors").write_bytes(b"the one that fits")
    write_own(tmp_path / "own.safetensors", target())
    refused = run("models", "add-head", str(tmp_path / "own.safetensors"), str(converted))
    assert refused.exit_code == 1
    assert "another vocabulary" in refused.stderr
    assert (converted / "mtp.safetensors").read_bytes() == b"the one that fits"


def test_what_was_there_stays_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["mimo"]
    head = family.make(build(family.target))
    original = write(tmp_path / "original", family.target, head)
    converted = write(tmp_path / "converted", family.target, {})
    (converted / "mtp.safetensors").write_bytes(b"what was there")
    source = mtp.find(original)
    assert source is not None

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("localspec.models.mtp.convert.mx.save_safetensors", fail)
        with pytest.raises(LocalspecError, match="No space left on device"):
            mtp.add_head(source, read_checkpoint(converted))
    assert (converted / "mtp.safetensors").read_bytes() == b"what was there"
    assert sorted(file.name for file in converted.iterdir() if "mtp" in file.name) == ["mtp.safetensors"]


def test_a_file_of_another_version_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "mtp.safetensors"
    mx.save_safetensors(
        str(file), {"head.a": mx.ones((2,))}, {"format": "localspec-head", "version": "9", "family": "x"}
    )
    with pytest.raises(IncompleteModelError, match="convert it again"):
        mtp.find(file)


def test_without_a_target_it_is_the_one_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["mimo"]
    original = write(tmp_path / "original", family.target, family.make(build(family.target)))
    converted = write(tmp_path / "converted", family.target, {})
    other = write(tmp_path / "other", "glm4_moe", {})
    (other / "config.json").write_text(json.dumps(families.configuration("glm4_moe") | {"hidden_size": 64}))
    here = [hub.Installed(str(path), path, 1, True, "hub") for path in (converted, other)]
    monkeypatch.setattr(hub, "installed", lambda: here)
    assert run("models", "add-head", str(original)).exit_code == 0
    assert (converted / "mtp.safetensors").is_file()
    for count, word in ((0, "no model here fits"), (2, "2 models here fit")):
        monkeypatch.setattr(hub, "installed", lambda count=count: here[:1] * count)
        refused = run("models", "add-head", str(original))
        assert refused.exit_code != 0
        assert word in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1


def test_a_checkpoint_without_a_head_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "mimo", {})
    refused = run("models", "add-head", str(folder), str(folder))
    assert refused.exit_code != 0
    assert "holds no MTP head" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
