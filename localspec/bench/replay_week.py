"""What earlier sessions are worth to drafting rules: `python -m localspec.bench.replay_week`. Needs no model.

One user's week (week.json) is lived through day by day: each answer is replayed cold and by rules that know the days
before. Day 1 is left out of the table, as nobody knows anything then. A question counts as asked again where an earlier
day had it, in the same words over material that may have changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from localspec.bench.replay import ALL, MOST, SWEEP, Tally, against, replay
from localspec.bench.replays import BASELINES, Rule
from localspec.bench.replays.own import LEAST, Localspec
from localspec.bench.replays.sessions import LlamaCppSessions, OwnSessions, Sessions, SuffixSessions
from localspec.bench.streams import WEEK, Recording, Stream, read_recording
from localspec.errors import LocalspecError

AGAIN, NEW = "asked again", "new questions"
Tallies = dict[str, Tally]


class Cold(Sessions):
    """Begins anew each time."""

    def __init__(self, rule: type[Rule]) -> None:
        self._rule = rule
        self.name = f"{rule.name}, cold"

    def begin(self) -> Rule:
        return self._rule()

    def teach(self, stream: Stream) -> None:
        pass


def live(week: Recording, sessions: Sessions, most: int = MOST, judged: Recording | None = None) -> Tallies:
    """Tallies of the days after the first: over all, of questions asked again and of new ones, and by kind of text.

    judged: the answers that are counted, all of the week where None; the others teach only.
    """
    found: Tallies = {ALL: Tally(), AGAIN: Tally(), NEW: Tally()}
    counted = {id(stream) for stream in (week if judged is None else judged).streams}
    asked: set[tuple[str, str]] = set()
    for day, streams in week.by_day().items():
        for stream in streams:
            if day > 1 and id(stream) in counted:
                tally = replay(stream, sessions.begin(), most)
                again = AGAIN if (stream.kind, stream.name) in asked else NEW
                for row in (ALL, again, stream.kind):
                    found[row] = found.get(row, Tally()) + tally
        for stream in streams:
            sessions.teach(stream)
            asked.add((stream.kind, stream.name))
    return found


def lines(found: Mapping[str, Tallies]) -> list[str]:
    """Rules down; tokens per pass and wasted rows per token across."""
    rows = list(next(iter(found.values())))
    table = ["| rule | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for name, tallies in found.items():
        cells = (f"{tallies[row].tokens_per_pass:.2f} / {tallies[row].wasted_per_token:.2f}" for row in rows)
        table.append(f"| {name} | " + " | ".join(cells) + " |")
    return table


def equal_lines(found: Mapping[str, Tallies], curve: Sequence[Tallies]) -> list[str]:
    """The same rows; each rule's tokens per pass, and ours, with what we learned, where it wastes as many rows."""
    rows = list(curve[0])
    table = ["| rule, ours | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for name, tallies in found.items():
        cells = (against(tallies[row], [point[row] for point in curve]) for row in rows)
        table.append(f"| {name} | " + " | ".join(cells) + " |")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, then one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.replay_week", description=__doc__)
    parser.add_argument("--most", type=int, default=MOST, help=f"drafts per round ({MOST})")
    parser.add_argument("--half", choices=("fit", "test", "all"), default="all", help="the answers counted (all)")
    options = parser.parse_args(arguments)
    if options.most < 1:
        parser.error("--most must be at least 1")
    try:
        week, corpus = read_recording(name=WEEK), read_recording()
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    judged = week if options.half == "all" else week.only(options.half)
    others: list[Sessions] = [
        *(Cold(rule) for rule in BASELINES),
        LlamaCppSessions(),
        LlamaCppSessions(list(corpus.streams)),
        SuffixSessions(),
    ]
    found = {sessions.name: live(week, sessions, options.most, judged) for sessions in others}
    curve = [live(week, OwnSessions(least), options.most, judged) for least in SWEEP]
    cold, own = Cold(Localspec), OwnSessions()
    ours = {sessions.name: live(week, sessions, options.most, judged) for sessions in (cold, own)}
    print(f"{week.model}, {week.how}: {len(judged.streams)} answers, at most {options.most} drafts a round")
    print(f"\ntokens per pass / wasted rows per token (ours with a least worth of {LEAST}):\n")
    print("\n".join(lines(found | ours)))
    print("\ntokens per pass of a rule, and ours, learned, with as many rows wasted:\n")
    print("\n".join(equal_lines(found | {cold.name: ours[cold.name]}, curve)))
    tallies = {name: {row: tally.as_dict() for row, tally in rows.items()} for name, rows in (found | ours).items()}
    print(json.dumps({"model": week.model, "most": options.most, "rules": tallies}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
