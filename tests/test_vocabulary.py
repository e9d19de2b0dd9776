"""Vocabularies are compared by what ids mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import SPECIAL, byte_tokens, save_model
from mlx_lm.utils import load_tokenizer

from localspec.errors import IncompatibleDrafterError
from localspec.vocabulary import check_same_vocabulary, fingerprint


class Words:
    """The part of a tokenizer that is looked at."""

    def __init__(self, words: list[str | None]) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words) if word is not None}


def test_same_tokens_pass_and_share_a_fingerprint(tmp_path: Path) -> None:
    save_model(tmp_path / "a", seed=1)
    save_model(tmp_path / "b", seed=2, vocab_size=320)  # rows padded: the tokenizer is what counts
    a, b = load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "b")
    check_same_vocabulary(a, b)
    check_same_vocabulary(b, a)
    assert fingerprint(a) == fingerprint(b)
    b.add_tokens(["<|new|>"])
    assert fingerprint(a) != fingerprint(b)


def test_real_tokenizers_with_two_tokens_swapped(tmp_path: Path) -> None:
    tokens = byte_tokens()
    tokens[70], tokens[90] = tokens[90], tokens[70]
    save_model(tmp_path / "a")
    save_model(tmp_path / "b", tokens=tokens)
    a, b = load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "b")
    with pytest.raises(IncompatibleDrafterError) as caught:
        check_same_vocabulary(a, b)
    text = str(caught.value)
    assert "id 70 " in text
    assert repr(byte_tokens()[70]) in text
    assert repr(byte_tokens()[90]) in text
    assert "\n" not in text
    assert fingerprint(a) != fingerprint(b)


def test_special_ids_must_agree(tmp_path: Path) -> None:
    save_model(tmp_path / "a")
    save_model(tmp_path / "b", tokens=[*byte_tokens()[:-2], *reversed(SPECIAL)])
    with pytest.raises(IncompatibleDrafterError, match="id 256 is '<|start|>' in the target".replace("|", r"\|")):
        check_same_vocabulary(load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "b"))


BASE: list[str | None] = [f"w{n}" for n in range(5000)]


@pytest.mark.parametrize("longer", [[*BASE, "<think>", "</think>"], [*BASE, *(f"<pad{n}>" for n in range(1024))]])
def test_tails_that_only_one_has_are_allowed(longer: list[str | None]) -> None:
    check_same_vocabulary(Words(longer), Words(BASE))
    check_same_vocabulary(Words(BASE), Words(longer))
    assert fingerprint(Words(longer)) != fingerprint(Words(BASE))


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        (BASE, [*BASE[:3000], None, *BASE[3001:]], ("id 3000", "no token", "w3000")),
        ([*BASE, "end\n"], [*BASE, "[end]"], ("id 5000", r"'end\n'", "[end]")),
        (BASE, BASE[:300], ("300 tokens", "5000", "id 300")),
        (BASE, [], ("0 tokens", "id 0")),
    ],
)
def test_differences_are_named(target: Any, draft: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(IncompatibleDrafterError) as caught:
        check_same_vocabulary(Words(target), Words(draft))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fingerprint_does_not_depend_on_order_or_confuse_neighbours() -> None:
    class Reversed(Words):
        def get_vocab(self) -> dict[str, int]:
            return dict(reversed(super().get_vocab().items()))

    assert fingerprint(Words(BASE)) == fingerprint(Reversed(BASE))
    assert fingerprint(Words(["a", "b"])) != fingerprint(Words(["b", "a"]))
    assert fingerprint(Words(['a", 1', "b"])) != fingerprint(Words(["a", '1"b']))
