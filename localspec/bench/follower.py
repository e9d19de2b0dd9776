"""The plainest n-gram drafter, to be compared with: what followed most often, without asking whether it will again."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.drafters.automaton import ROOT, SuffixAutomaton
from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.tokens import Source


class Follower(Drafter):
    """Wherever the last `shortest` tokens or more stood before: the most frequent follower, again and again."""

    name: Source = "ngram"
    free = True

    def __init__(self, shortest: int) -> None:
        super().__init__()
        self._shortest = shortest
        self._automaton = SuffixAutomaton()

    def fresh(self) -> Follower:
        return Follower(self._shortest)

    def commit(self, tokens: Sequence[int]) -> None:
        self._automaton.extend(tokens)
        self.context.extend(tokens)

    def reset(self) -> None:
        super().reset()
        self._automaton = SuffixAutomaton()

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        automaton = self._automaton
        state = automaton.link[automaton.whole]
        matched = automaton.length[state] if state > ROOT else 0
        if matched < self._shortest:
            return None
        tokens: list[int] = []
        while len(tokens) < length:
            while state > ROOT and automaton.favourite[state] < 0:
                state = automaton.link[state]
            if state <= ROOT:
                break
            tokens.append(automaton.favourite[state])
            state = automaton.step(state, tokens[-1])
        return Proposal(tokens, self.name, match_length=matched) if tokens else None
