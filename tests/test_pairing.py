"""Which model drafts for a target: chosen among what is here, or named; wrong pairs are refused before any weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import SPECIAL, byte_tokens, isolate, one_line, save_model
from scripted_engine import Scripted, run

from localspec import hub, loading, memory, pairing
from localspec.checkpoint import read_checkpoint
from localspec.errors import IncompatibleDrafterError
from localspec.loading import load
from localspec.models import catalogue

COMMIT = "0123456789abcdef"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a network; returns its folder."""
    isolate(tmp_path, monkeypatch)
    monkeypatch.setattr(hub, "_from_hub", lambda name, *_: pytest.fail(f"{name} was to be fetched"))
    return tmp_path


def put(machine: Path, name: str, **changes: Any) -> Path:
    """A tiny model of a catalogue name, where the program would have put it."""
    entry = catalogue()[name]
    if entry.package is not None:
        folder = machine / "home" / "models" / name
    else:
        assert entry.hub is not None
        repository = machine / "hub" / f"models--{entry.hub.replace('/', '--')}"
        folder = repository / "snapshots" / COMMIT
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
    save_model(folder, **changes)
    return folder


def loaded(name: str | Path, **keywords: Any) -> tuple[list[str], list[str]]:
    """The names of what drafts, and what was said of it."""
    said: list[str] = []
    engine = load(name, dtype="float32", on_choice=said.append, **keywords)
    return [drafter.name for drafter in engine.drafters], said


BIG, SMALL = {"num_hidden_layers": 6}, {"num_hidden_layers": 1, "seed": 2}


# By itself


def test_a_draft_that_is_here_is_taken(machine: Path) -> None:
    put(machine, "qwen3-4b", **BIG)
    put(machine, "qwen3-0.6b", **SMALL)
    assert loaded("qwen3-4b") == (
        ["ngram", "draft"],
        ["qwen3-0.6b drafts for qwen3-4b; --draft none leaves it out"],
    )
    assert loaded("mlx-community/Qwen3-4B-4bit")[0] == ["ngram", "draft"]
    assert loaded("qwen3-4b", draft="none") == (["ngram"], [])
    assert loaded("qwen3-4b", draft=None) == (["ngram"], [])
    assert loaded("qwen3-4b", drafters=()) == ([], [])
    assert loaded("qwen3-4b", drafters=["ngram"]) == (["ngram"], [])


def test_the_first_of_the_catalogues_drafts_comes_first(machine: Path) -> None:
    put(machine, "qwen3-8b", **BIG)
    put(machine, "qwen3-1.7b", **SMALL)
    assert loaded("qwen3-8b")[1][0].startswith("qwen3-1.7b drafts for qwen3-8b")
    put(machine, "qwen3-0.6b", **SMALL)
    assert loaded("qwen3-8b")[1][0].startswith("qwen3-0.6b drafts for qwen3-8b")


def test_nothing_is_fetched_but_it_is_said_what_would_help(machine: Path) -> None:
    put(machine, "qwen3-4b", **BIG)
    assert loaded("qwen3-4b") == (["ngram"], ["qwen3-0.6b could draft for qwen3-4b: localspec models pull qwen3-0.6b"])
    put(machine, "smollm2", **BIG)
    assert loaded("smollm2") == (["ngram"], [])


@pytest.mark.parametrize(
    "fault", ["another vocabulary", "another end", "not whole", "hardly smaller", "damaged tokenizer"]
)
def test_a_draft_that_does_not_fit_is_left_out(machine: Path, fault: str) -> None:
    put(machine, "qwen3-4b", **BIG)
    tokens = byte_tokens()
    tokens[0], tokens[1] = tokens[1], tokens[0]
    changes = {"another vocabulary": {"tokens": tokens}, "hardly smaller": {"num_hidden_layers": 5}}.get(fault, {})
    folder = put(machine, "qwen3-0.6b", **(SMALL | changes))
    if fault == "another end":
        end_with(folder, SPECIAL[0])
    elif fault == "not whole":
        (folder / "model.safetensors").unlink()
    elif fault == "damaged tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    assert loaded("qwen3-4b")[0] == ["ngram"]


def test_both_must_fit_into_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = put(machine, "qwen3-4b", **BIG), put(machine, "qwen3-0.6b", **SMALL)
    monkeypatch.setattr(memory, "needed_bytes", lambda weights: weights)
    both = read_checkpoint(target).bytes + read_checkpoint(draft).bytes
    for available, drafters in ((both - 1, ["ngram"]), (both, ["ngram", "draft"])):
        monkeypatch.setattr(memory, "available_bytes", lambda available=available: available)
        chosen, (line,) = loaded("qwen3-4b")
        assert chosen == drafters
        assert ("both need" in line) is (drafters == ["ngram"])


def test_a_model_that_the_catalogue_lacks_is_paired_by_its_tokenizer(machine: Path) -> None:
    save_model(machine / "tuned", **BIG)
    save_model(machine / "other", tokens=list(reversed(byte_tokens()[:-2])) + list(SPECIAL), **BIG)
    put(machine, "smollm2", **SMALL)
    assert loaded(machine / "tuned") == (["ngram", "draft"], ["smollm2 drafts for tuned; --draft none leaves it out"])
    assert loaded(machine / "other") == (["ngram"], [])


def test_a_heads_place(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that comes with the target is better than any small model, and no other is looked for."""
    folder = put(machine, "qwen3-4b", **BIG)
    put(machine, "qwen3-0.6b", **SMALL)
    target = pairing.plan_of("qwen3-4b", folder, "float32")
    its_head = SimpleNamespace(bytes=1)
    monkeypatch.setattr("localspec.models.mtp.choose", lambda *_: its_head)
    for draft, mtp in (("auto", "auto"), ("auto", "a head"), ("none", "a head"), (None, "a head")):
        chosen = pairing.pair(target, None, draft, lambda _: pytest.fail("looked further"), mtp=mtp)
        assert (chosen.head, chosen.draft) == (its_head, None)
    for draft, mtp in (("none", "auto"), (None, "auto"), ("none", "none")):
        assert pairing.pair(target, None, draft, lambda _: pytest.fail("looked further"), mtp=mtp) == pairing.Pairing()


# By name


def refused(machine: Path, monkeypatch: pytest.MonkeyPatch, draft: str | Path, target: str = "target") -> str:
    """Why the pair is refused, in one line; no weights are loaded, no tokenizer twice."""
    monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("weights were loaded"))
    asked: list[Path] = []
    tokenizer_of = loading.load_tokenizer

    def counted(checkpoint: Any) -> Any:
        asked.append(checkpoint.path)
        return tokenizer_of(checkpoint)

    monkeypatch.setattr(loading, "load_tokenizer", counted)
    with pytest.raises(IncompatibleDrafterError) as caught:
        load(machine / target, draft=draft, dtype="float32")
    assert len(asked) == len(set(asked))
    return one_line(caught)


def end_with(folder: Path, token: str) -> None:
    """Make the token the model's end token, in all of its files."""
    for name, value in (("tokenizer_config.json", token), ("config.json", byte_tokens().index(token))):
        table = json.loads((folder / name).read_text())
        table["eos_token" if "tokenizer" in name else "eos_token_id"] = value
        (folder / name).write_text(json.dumps(table))


def test_another_vocabulary(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = byte_tokens()
    tokens[70], tokens[90] = tokens[90], tokens[70]
    save_model(machine / "target", **BIG)
    save_model(machine / "draft", tokens=tokens, **SMALL)
    line = refused(machine, monkeypatch, machine / "draft")
    assert f"id 70 is {byte_tokens()[70]!r} in the target and {byte_tokens()[90]!r} in the draft" in line


def test_special_tokens_in_another_order(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(machine / "target", **BIG)
    save_model(machine / "draft", tokens=[*byte_tokens()[:-2], *reversed(SPECIAL)], **SMALL)
    assert f"id 256 is {SPECIAL[0]!r} in the target" in refused(machine, monkeypatch, machine / "draft")


def test_the_same_tokens_but_another_end(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(machine / "target", **BIG)
    save_model(machine / "draft", **SMALL)
    end_with(machine / "draft", SPECIAL[0])
    line = refused(machine, monkeypatch, machine / "draft")
    assert f"{SPECIAL[1]!r} (id 257) in the target, {SPECIAL[0]!r} (id 256) in the draft" in line
    # One end in common is enough: instruction tunes add theirs to the base model's.
    table = json.loads((machine / "draft" / "config.json").read_text())
    (machine / "draft" / "config.json").write_text(json.dumps(table | {"eos_token_id": [256, 257]}))
    monkeypatch.undo()
    isolate(machine, monkeypatch)
    assert loaded(machine / "target", draft=machine / "draft")[0] == ["ngram", "draft"]


def test_itself_and_what_is_no_smaller(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(machine / "target", **BIG)
    save_model(machine / "larger", num_hidden_layers=7)
    (machine / "link").symlink_to(machine / "target")
    for same in ("target", "link"):
        assert "cannot draft for itself" in refused(machine, monkeypatch, machine / same)
    assert "the draft larger (" in refused(machine, monkeypatch, machine / "larger")


@pytest.mark.parametrize("rows", [258, 320, 1200])
def test_padded_rows_make_no_other_vocabulary(machine: Path, rows: int) -> None:
    """Embeddings of one family are padded to different multiples; what the tokenizers say is what counts."""
    save_model(machine / "target", **BIG, vocab_size=1200)
    save_model(machine / "draft", **SMALL, vocab_size=rows)
    engine = load(machine / "target", draft=str(machine / "draft"), dtype="float32")
    plain = engine.generate("abcabc", max_tokens=16, speculate=False, temperature=0.9, seed=1)
    assert engine.generate("abcabc", max_tokens=16, draft_length=3, temperature=0.9, seed=1).ids == plain.ids


def test_a_folder_of_such_a_name_is_written_as_a_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(machine / "target", **BIG)
    save_model(machine / "none", **SMALL)
    monkeypatch.chdir(machine)
    assert loaded("target", draft="none")[0] == ["ngram"]
    assert loaded("target", draft="./none")[0] == ["ngram", "draft"]


# On the command line


def test_options(scripted: Scripted) -> None:
    for arguments, draft in (
        ([], "auto"),
        (["--draft", "none"], "none"),
        (["--draft", "small"], "small"),
        (["--no-speculation"], "none"),
        (["--no-speculation", "--draft", "small"], "small"),
    ):
        assert run("chat", "-p", "Hi", *arguments).exit_code == 0
        assert scripted.loads[-1][1]["draft"] == draft


def test_the_choice_is_said_on_stderr_where_it_is_read(machine: Path) -> None:
    put(machine, "qwen3-4b", **BIG)
    put(machine, "qwen3-0.6b", **SMALL)
    arguments = ("chat", "qwen3-4b", "-p", "abc", "--max-tokens", "2", "--dtype", "float32")
    template = json.loads((hub.find("qwen3-4b") / "tokenizer_config.json").read_text())  # type: ignore[operator]
    template["chat_template"] = "{{ messages[-1]['content'] }}"
    (hub.find("qwen3-4b") / "tokenizer_config.json").write_text(json.dumps(template))  # type: ignore[operator]
    assert "drafts for" not in run(*arguments).stderr
    assert "qwen3-0.6b drafts for qwen3-4b" in run(*arguments, "--verbose").stderr


def test_models_list_and_show_know_the_pairs(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 5 * 10**9)
    put(machine, "qwen3-0.6b", **SMALL)
    records = {record["name"]: record for record in json.loads(run("models", "list", "--json").stdout)}
    pairs = records["qwen3-8b"]["pairs"]
    assert [pair["name"] for pair in pairs] == records["qwen3-8b"]["drafts"] == ["qwen3-0.6b", "qwen3-1.7b"]
    assert [pair["installed"] for pair in pairs] == [True, False]
    assert {pair["licence"] for pair in pairs} == {"Apache-2.0"}
    assert pairs[0]["memory_bytes"] == records["qwen3-8b"]["memory_bytes"] + records["qwen3-0.6b"]["memory_bytes"]
    assert pairs[0]["fits"] is False
    assert records["qwen3-4b"]["pairs"][0]["fits"] is True
    row = next(line for line in run("models", "list").stdout.splitlines() if line.startswith("qwen3-8b"))
    assert "Apache-2.0" in row
    assert row.endswith("qwen3-0.6b (here), qwen3-1.7b")
    shown = [line for line in run("models", "show", "qwen3-8b").stdout.splitlines() if line.startswith("drafts with")]
    assert "qwen3-0.6b (0.6B), Apache-2.0, 7 GB together, more than is available now, here" in shown[0]
    assert "localspec models pull qwen3-1.7b" in shown[1]
    save_model(machine / "tuned", **BIG)
    assert "qwen3-0.6b" in run("models", "show", str(machine / "tuned")).stdout
    save_model(machine / "other", tokens=list(reversed(byte_tokens()[:-2])) + list(SPECIAL), **BIG)
    assert json.loads(run("models", "show", str(machine / "other"), "--json").stdout)["pairs"] == []
