"""Decodes with every architecture that mlx-lm can build, with and without speculation, and compares the ids.

    python tests/sweep.py                          # all: half an hour of one core
    python tests/sweep.py mamba2 gemma3n           # some
    python tests/sweep.py --log build/sweep.jsonl  # goes on where the log ends
    python tests/sweep.py --docs                   # writes docs/architectures.md at the end

Leaves with 1 when anything differs that neither rounding nor a known fault of mlx-lm explains.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from architectures import ARCHITECTURES, CANNOT_BE_BUILT, FAULTS_OF_MLX_LM, HELPERS, VOCABULARY, WINDOW, build, modules
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import CacheList, make_prompt_cache
from tiny import tiny_llama

from localspec.bench.gap import key_gap
from localspec.drafters import ModelDrafter, NgramDrafter
from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.session import Session
from localspec.settings import Settings
from localspec.tokens import Source
from localspec.transaction import Transaction

TOKENS = 44
SEED = 7
TIE = 1e-3
"""Largest distance of two tokens' logits at which rounding may choose between them. Logits deviate by 2 or so here."""
_BLOCK = [11, 60, 3, 88, 42, 17, 5]
PROMPTS = {
    "short": [5, 7, 9, 50, 3],
    "long": [*_BLOCK, 70, 23, *_BLOCK, 31, *_BLOCK[2:], 64, 2, 9, *_BLOCK[:4]],
}
"""Shorter than the window, and longer; the second repeats itself, so that n-grams propose from the start."""
assert len(PROMPTS["short"]) < WINDOW < len(PROMPTS["long"])
DOCS = Path(__file__).parent.parent / "docs" / "architectures.md"


class Oracle(Drafter):
    """Drafts what will be said, with few mistakes at some places and many at others, so that every number of drafts is
    kept sooner or later."""

    name: Source = "draft"

    def __init__(self, sequence: Sequence[int]) -> None:
        super().__init__()
        self.sequence = list(sequence)

    def fresh(self) -> Oracle:
        return Oracle(self.sequence)

    def commit(self, tokens: Sequence[int]) -> None:
        self.context.extend(tokens)

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        start = len(self.context)
        chance = random.Random(start)
        said = self.sequence[start : start + length]
        right = chance.choice((0.6, 0.8, 0.95))
        drafts = [token if chance.random() < right else (token + 1) % VOCABULARY for token in said]
        return Proposal(drafts, self.name) if drafts else None


@dataclass
class Divergence:
    """The first place where two runs went apart."""

    case: str
    mlx_lm: bool
    """Whether plain ids were compared with those of mlx-lm's loop."""
    index: int
    """Tokens that were alike."""
    gap: float
    """Distance of the two tokens' logits (plus noise) after the tokens that were alike, by a pass of its own."""

    @property
    def tie(self) -> bool:
        return self.gap <= TIE


@dataclass
class Result:
    """What the sweep found out about one architecture."""

    name: str
    caches: list[str] = field(default_factory=list)
    """The kinds that the model asks for."""
    rollback: str = ""
    rounding: float = 0.0
    """Largest difference of a logit between a pass of several rows and passes of one; 0.0: they agree bit for bit."""
    distinct: int = 0
    """Different tokens in the greedy answers: a model that says one thing again and again would hide faults."""
    runs: int = 0
    drafted: int = 0
    accepted: int = 0
    partial: list[int] = field(default_factory=list)
    """Numbers of drafts kept in rounds that kept some and not all."""
    divergences: list[Divergence] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""
    """What stopped it."""

    @property
    def verdict(self) -> str:
        """Of speculation on against off."""
        if self.error:
            return "FAILS"
        return _verdict([d for d in self.divergences if not d.mlx_lm])

    @property
    def plain(self) -> str:
        """Of speculation off against mlx-lm."""
        return _verdict([d for d in self.divergences if d.mlx_lm])

    @property
    def fault(self) -> bool:
        """Whether something is wrong that is not mlx-lm's own."""
        if self.error:
            return True
        return "DIFFERS" in (self.verdict, self.plain) and self.name not in FAULTS_OF_MLX_LM


def _verdict(divergences: Sequence[Divergence]) -> str:
    if not divergences:
        return "identical"
    return "ties" if all(d.tie for d in divergences) else "DIFFERS"


class Examination:
    """All comparisons on one architecture."""

    def __init__(self, name: str) -> None:
        self.model = build(name)
        self.engine = Engine(self.model, drafters=[])
        self.result = Result(name, kinds(make_prompt_cache(self.model)))
        self._draft = ModelDrafter(tiny_llama(1, vocabulary=VOCABULARY, layers=1))
        self._plain: dict[tuple[str, float], list[int]] = {}

    def run(
        self,
        lengths: Sequence[int] = (1, 4, 8),
        temperatures: Sequence[float] = (0.0, 0.8),
        prompts: Sequence[str] = tuple(PROMPTS),
    ) -> Result:
        started = time.perf_counter()
        self.result.rounding = self.rounding()
        for prompt in prompts:
            for temperature in temperatures:
                for length in lengths:
                    for drafter in self._drafters(prompt, temperature):
                        self.compare(prompt, temperature, length, drafter)
                self.compare_turns(prompt, temperature, lengths[-1])
            self.compare_with_mlx_lm(prompt)
        self.result.distinct = len({token for prompt in prompts for token in self.plain(prompt, 0.0)})
        self.result.seconds = round(time.perf_counter() - started, 1)
        return self.result

    def plain(self, prompt: str, temperature: float) -> list[int]:
        """Ids without speculation, from fresh caches."""
        key = prompt, temperature
        if key not in self._plain:
            self._plain[key] = self._decode(self.engine.new_session(), PROMPTS[prompt], temperature, speculate=False)
        return self._plain[key]

    def compare(self, prompt: str, temperature: float, length: int, drafter: Drafter) -> None:
        """One speculative run against the plain one."""
        session = self._session(drafter)
        found = self._decode(session, PROMPTS[prompt], temperature, draft_length=length)
        case = f"{type(drafter).__name__}, length {length}, temperature {temperature}, {prompt} prompt"
        self._judge(case, PROMPTS[prompt], temperature, self.plain(prompt, temperature), found)

    def compare_turns(self, prompt: str, temperature: float, length: int) -> None:
        """A turn that is left in the middle of an accepted block, and the next one against a cold run of its prompt."""
        plain, said = self.plain(prompt, temperature), 17
        session = self._session(Oracle(PROMPTS[prompt] + plain))
        settings = Settings.from_keywords(max_tokens=TOKENS, temperature=temperature, seed=SEED, draft_length=length)
        generation = self.engine.generation(session, PROMPTS[prompt], settings)
        for _ in zip(range(said), generation, strict=False):
            pass
        generation.close()
        following = PROMPTS[prompt] + generation.ids + [33, 44, 55]
        cold = self._decode(self.engine.new_session(), following, temperature, speculate=False)
        session.drafters = [Oracle(following + cold)]
        found = self._decode(session, following, temperature, draft_length=length)
        self._judge(f"second turn, temperature {temperature}, {prompt} prompt", following, temperature, cold, found)

    def compare_with_mlx_lm(self, prompt: str) -> None:
        """The plain greedy ids against those of mlx-lm's own loop."""
        steps = generate_step(mx.array(PROMPTS[prompt]), self.model, max_tokens=TOKENS)
        expected = [int(token) for token, _ in steps]
        plain = self.plain(prompt, 0.0)
        self._judge(f"mlx-lm's loop, {prompt} prompt", PROMPTS[prompt], 0.0, plain, expected, mlx_lm=True)

    def rounding(self) -> float:
        """How far one pass of nine rows and nine passes of one are apart, in any logit."""
        rows = mx.array(_BLOCK + _BLOCK[:2], mx.uint32)
        many, single = Transaction(self.engine.target), Transaction(self.engine.target)
        for transaction in (many, single):
            transaction.prefill(PROMPTS["long"])
        together = many.forward(rows)
        self.result.rollback = many.rollback  # known for certain after a pass
        apart = mx.concatenate([single.forward(rows[i : i + 1]) for i in range(rows.size)])
        known = mx.isfinite(together) & mx.isfinite(apart)
        return float(mx.max(mx.where(known, mx.abs(together - apart), 0.0)).item())

    def _drafters(self, prompt: str, temperature: float) -> Iterator[Drafter]:
        yield NgramDrafter()
        yield self._draft
        yield Oracle(PROMPTS[prompt] + self.plain(prompt, temperature))

    def _session(self, drafter: Drafter) -> Session:
        return Session(self.engine.target, [drafter.fresh()])

    def _decode(self, session: Session, prompt: list[int], temperature: float, **settings: Any) -> list[int]:
        chosen = Settings.from_keywords(max_tokens=TOKENS, temperature=temperature, seed=SEED, **settings)
        generation = self.engine.generation(session, prompt, chosen).run()
        result, stats = self.result, generation.stats
        result.drafted += stats.drafted
        result.accepted += stats.accepted
        partial = {r.accepted for r in generation.rounds if 0 < r.accepted < len(r.drafted)}
        result.partial = sorted({*result.partial, *partial})
        return generation.ids

    def _judge(
        self,
        case: str,
        prompt: list[int],
        temperature: float,
        one: list[int],
        other: list[int],
        *,
        mlx_lm: bool = False,
    ) -> None:
        self.result.runs += 1
        if one == other:
            return
        index = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        gap = float("inf")
        if index < len(one) and index < len(other):
            settings = Settings.from_keywords(temperature=temperature, seed=SEED)
            gap, _ = key_gap(self.engine, prompt + one[:index], settings, one[index], other[index])
        self.result.divergences.append(Divergence(case, mlx_lm, index, gap))


def kinds(caches: Sequence[Any]) -> list[str]:
    """The kinds of cache in a list, each once, lists within it spelled out."""

    def kind(cache: Any) -> str:
        name = type(cache).__name__
        if isinstance(cache, CacheList):
            return f"{name}({', '.join(kind(inner) for inner in cache.caches)})"
        return name

    return list(dict.fromkeys(kind(cache) for cache in caches))


_PAGE = """# Architectures

Written by `make sweep ARGS=--docs`. It builds each architecture of mlx-lm small and with random weights, and decodes
{tokens} tokens from a prompt shorter than the sliding window and from a longer one, at temperatures 0 and 0.8, with
draft lengths 1, 4 and 8 and three drafters: n-grams, an unrelated model, and an oracle that makes mistakes. The
ids are compared with plain decoding, and plain decoding with mlx-lm's own loop. A turn is left in the middle of an
accepted block, and the next one is compared with a cold run.

{totals}.

**Rollback** is how rejected drafts leave the caches. *cut*: keys and values are dropped from the end. *record*:
recurrent state from before the pass is put back and advanced by what the recurrent layers recorded, without reading a
weight. *replay*: all caches are put back and the kept tokens run through the model again. A sliding window
(RotatingKVCache) is held in a cache of localspec's own, which can be cut.

**Rounding** is the largest difference of a logit between one pass of nine rows and nine passes of one row, in float32
with MLX's CPU backend on {machine}. Where it is 0 they agree bit for bit, and any difference of ids is a fault. Where
it is not, ids may go apart at two tokens whose logits (plus the noise of the draw) are as close as that: a *tie* is a
run that went apart at a gap of at most {tie:g}. Ties are counted, not hidden.

| architecture | caches | rollback | rounding | speculation on and off | off, and mlx-lm's loop |
|---|---|---|---|---|---|
{rows}

Where mlx-lm does not agree with itself:

{faults}

Not in the table:

{absent}
"""


def table(results: Sequence[Result]) -> str:
    """The page in docs/."""
    ordered = sorted(results, key=lambda r: r.name.lower())
    rows = [
        f"| {' | '.join([r.name, ', '.join(r.caches), r.rollback, _round(r), _outcome(r), _outcome(r, mlx_lm=True)])} |"
        for r in ordered
    ]
    return _PAGE.format(
        tokens=TOKENS,
        totals=totals(results),
        machine=f"{platform.system()} {platform.machine()}",
        tie=TIE,
        rows="\n".join(rows),
        faults=_items(FAULTS_OF_MLX_LM),
        absent=_items(CANNOT_BE_BUILT),
    )


def totals(results: Sequence[Result]) -> str:
    """One line of figures."""
    verdicts = [r.verdict for r in results]
    runs, bad = sum(r.runs for r in results), [d for r in results for d in r.divergences]
    return (
        f"{len(results)} architectures: {verdicts.count('identical')} identical in every run, {verdicts.count('ties')} "
        f"but for ties, {verdicts.count('DIFFERS')} different, {verdicts.count('FAILS')} failed; "
        f"{len(CANNOT_BE_BUILT)} more cannot be built here. "
        f"{runs} comparisons, {sum(d.tie for d in bad)} with a tie, {sum(not d.tie for d in bad)} different"
    )


def _outcome(result: Result, *, mlx_lm: bool = False) -> str:
    if result.error:
        return result.error
    found = [d for d in result.divergences if d.mlx_lm == mlx_lm]
    if not found:
        return "identical"
    return f"{_verdict(found)}: {len(found)}, largest gap {max(d.gap for d in found):.0e}"


def _items(reasons: dict[str, str]) -> str:
    return "\n".join(f"- `{name}`: {why}." for name, why in reasons.items())


def _round(result: Result) -> str:
    return f"{result.rounding:.0e}" if result.rounding else "0"


def _examine(name: str) -> Result:
    examination = Examination(name)
    try:
        return examination.run()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, LocalspecError) as error:
        examination.result.error = f"{type(error).__name__}: {error}"
        return examination.result


def _read(log: Path | None) -> list[Result]:
    if log is None or not log.exists():
        return []
    saved = [json.loads(line) for line in log.read_text().splitlines()]
    return [Result(**{**d, "divergences": [Divergence(**x) for x in d["divergences"]]}) for d in saved]


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *ARCHITECTURES], metavar="ARCHITECTURE")
    parser.add_argument("--log", type=Path, help="JSON lines of results; architectures in it are not run again")
    parser.add_argument("--docs", action="store_true", help=f"write {DOCS.parent.name}/{DOCS.name}")
    options = parser.parse_args(arguments)
    unknown = modules() - HELPERS - set(ARCHITECTURES) - set(CANNOT_BE_BUILT)
    results = _read(options.log)
    done = {r.name for r in results}
    for name in options.names or ARCHITECTURES:
        if name in done:
            continue
        result = _examine(name)
        results.append(result)
        say(
            f"{name:20} {result.verdict:9} {result.runs:3} runs, {result.accepted:4} of {result.drafted} drafts kept, "
            f"{result.distinct:2} distinct, {result.rollback}, rounding {result.rounding:.0e}, {result.seconds:.0f} s"
        )
        if result.error:
            say(f"    {result.error}")
        for d in result.divergences:
            say(f"    {'tie' if d.tie else 'DIFFERS'} after {d.index} tokens, gap {d.gap:.1e}: {d.case}")
        sys.stdout.flush()
        if options.log is not None:
            options.log.parent.mkdir(parents=True, exist_ok=True)
            with options.log.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    say(totals(results))
    if options.docs:
        DOCS.write_text(table(results))
    if unknown:
        say(f"without a configuration here: {', '.join(sorted(unknown))}")
    return 1 if any(r.fault for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
