"""How each token source is named and explained on the screen.

The looks are in `app.tcss` under the component classes named here: a colour for dark and one for light themes (Okabe
and Ito's palette, which colour-blind people can tell apart), and a text attribute that carries the difference alone
where there are no colours.
"""

from __future__ import annotations

from typing import NamedTuple

from localspec.tokens import Level, Source


class Provenance(NamedTuple):
    """One source's words."""

    label: str
    meaning: str


PROVENANCE: dict[Source, Provenance] = {
    "plain": Provenance("plain", "nothing was guessed: the model wrote it by itself"),
    "ngram": Provenance("n-gram", "guessed from text seen before, and the model agreed"),
    "mtp": Provenance("MTP", "guessed by the model's own extra heads, and the model agreed"),
    "draft": Provenance("draft", "guessed by the small draft model, and the model agreed"),
    "resampled": Provenance("resampled", "the model disagreed with the guess and wrote this instead"),
    "bonus": Provenance("bonus", "the model's own next token after a guess that was right to its end"),
    "skip": Provenance("skip", "guessed by some of the model's own layers, and the whole model agreed"),
    "text": Provenance("text", "guessed by a draft model with other tokens, through the text, and the model agreed"),
    "grammar": Provenance("grammar", "the only token that the asked-for form allowed there"),
}
"""Every source, in the order of the legend, which leaves out the last ones where there is no room."""

RARE: frozenset[Source] = frozenset({"skip", "text", "grammar"})
"""Those that have to be asked for: the legend has no room for all at once."""

REMEMBERED = Provenance("learned", "an n-gram that earlier answers, or your own texts, taught: localspec cache")
"""N-grams from outside this chat, which have the colour of the others and an attribute more."""


def component(source: Source, level: Level | None = None) -> str:
    """The component class that styles tokens of this source, and of this level where an n-gram was found."""
    return "token--learned" if level in ("learned", "seed") else f"token--{source}"


COMPONENTS: set[str] = {component(source) for source in PROVENANCE} | {component("ngram", "learned")}
