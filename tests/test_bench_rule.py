"""The bench against a fixed rule: what it prints, and what it refuses."""

from __future__ import annotations

import pytest
from tiny import chat_engine

from localspec.bench import rule
from localspec.bench.follower import Follower
from localspec.bench.workloads import choose_workloads
from localspec.drafters.protocol import Draw
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.noise import Noise
from localspec.settings import Settings


def _engines() -> tuple[Engine, Engine]:
    own = chat_engine(1)
    return own, Engine(own.model, own.tokenizer, drafters=[Follower(rule.SHORTEST)])


def test_each_prompt_is_paired_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    ratios = rule.compare(*_engines(), repeats=1, max_tokens=6, exact="off")
    workloads = choose_workloads(None)
    assert {kind: len(values) for kind, values in ratios.items()} == {w.name: len(w.prompts) for w in workloads}
    assert all(value > 0 for values in ratios.values() for value in values)
    assert len(capsys.readouterr().out.splitlines()) == sum(len(w.prompts) for w in workloads)


def test_other_ids_are_a_bug_unless_nearly_tied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = chat_engine(1), chat_engine(2)
    with pytest.raises(LocalspecError, match="this is a bug"):
        rule.compare(own, other, repeats=1, max_tokens=6, exact="off")
    monkeypatch.setattr("localspec.bench.gap.key_gap", lambda *a: (0.0, 1e-3))
    assert len(rule.compare(own, other, repeats=1, max_tokens=6, exact="off")) < len(choose_workloads(None))
    assert "near-tie" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--max-tokens", "1"]])
def test_bad_numbers_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        rule.main(arguments)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], [3, 1, 2, 4]),  # more often, not last; then by the longest match
        ([1, 2, 3, 4, 9, 2], []),  # one token is no match
        ([1, 2], []),
    ],
)
def test_the_rule_follows_the_most_frequent(text: list[int], drafts: list[int]) -> None:
    follower = Follower(rule.SHORTEST)
    follower.follow(text)
    proposal = follower.propose(4, Draw(Settings(), Noise(0), 64))
    assert ([] if proposal is None else proposal.tokens) == drafts
    follower.follow(text[:1])
    assert follower.fresh().context == []
    assert follower.propose(4, Draw(Settings(), Noise(0), 64)) is None
