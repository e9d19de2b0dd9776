"""Target passes over caches, kept in part or taken back exactly, whatever kinds of cache the model mixes.

Between rounds every cache holds the same tokens, and the transaction knows how many. Three ways back, the cheapest
that does: cut the cache's end (key/value caches); restore the state from before the pass and replay the recurrent
layers' own record of it (recurrent state); restore everything and run the kept rows through the target again (anything
else).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from localspec.attention import by_row
from localspec.caches.leaves import CutLeaf, SnapshotLeaf, is_recurrent, leaves_of
from localspec.caches.recorder import Recorder, Recording
from localspec.errors import CacheError
from localspec.hidden import HiddenStates
from localspec.kernels.matmul import few_rows
from localspec.kernels.recurrence import replaying
from localspec.rows import RowClass
from localspec.target import Target

PREFILL_STEP = 512
"""Prompt tokens per pass. The same for every run: chunking must not differ between runs that are to be identical."""

_UNDOABLE_PASSES = 32
"""Committed passes that are remembered where they may still be taken back; each holds on to its recurrent state."""

Rollback = Literal["cut", "record", "replay"]
"""How rejected rows leave the caches: `cut` from their end; `record`: recurrent layers replay what they recorded;
`replay`: the target runs the kept rows again."""


@dataclass(slots=True)
class _Pass:
    """One pass that can still be taken back, in whole or in part."""

    start: int
    """Tokens in the caches before it."""
    rows: int
    ids: mx.array
    marks: list[Any]
    """One per leaf, from before the pass."""
    recording: Recording | None


class Transaction:
    """`forward` runs a pass, `commit(length)` keeps the first tokens of what the caches hold then.

    Invariant after a commit without rows in flight: every cache holds exactly `length` tokens.
    """

    def __init__(self, target: Target, *, record: bool = True, hidden: HiddenStates | None = None) -> None:
        """`record=False` has recurrent state replayed through the target instead of recorded; same result, slower.
        `hidden`: where to keep hidden states of the passes, new and empty."""
        self._quantization = target.kv_quantization
        """How key/value caches are still to be converted; None when they are not, or were."""
        self._target = target
        self.caches = target.new_caches()
        self._leaves = leaves_of(self.caches)
        self._snapshots = [leaf for leaf in self._leaves if isinstance(leaf, SnapshotLeaf)]
        recurrent = [leaf.cache for leaf in self._snapshots if is_recurrent(leaf)]
        self.rollback: Rollback = "cut" if not self._snapshots else "replay"
        self._recorder: Recorder | None = None
        if record and self._snapshots and len(recurrent) == len(self._snapshots):
            self._recorder = Recorder(target.model, recurrent)
            self.rollback = "record"
        self._passes: list[_Pass] = []
        self._quantized_from = 0
        """Tokens at which the caches were converted."""
        self.row_class: RowClass | None = None
        """When given, passes have sizes of this class only: filler rows make up what they lack, and attention is
        computed row by row. Prompt processing, whose passes are the same in every run, is not concerned."""
        self._fillers = 0
        """Filler rows at the end of every cache; gone before anything else happens to them."""
        self.length = 0
        """Tokens committed to every cache."""
        self.undecided: int | None = None
        """Where given, `rewind` can go back so far even if passes were committed since, `_UNDOABLE_PASSES` at most."""
        self.held = 0
        """Tokens in the caches, those of passes not committed yet included, filler rows not."""
        self.hidden = hidden
        """Of the tokens held, whichever pass ran them."""

    def forward(self, ids: mx.array) -> mx.array:
        """One target pass over `ids`, integer [rows]; logits [rows, vocabulary], lazy. Held until a commit decides."""
        self._drop_fillers()
        self._quantize_if_due()
        rows, sizes = ids.shape[0], self._sizes()
        width = rows if sizes is None else sizes.width(rows)
        if width > rows:
            ids = mx.concatenate([ids, mx.repeat(ids[-1:], width - rows)])
        # A pass of which something was kept cannot be wanted back once the next one runs, but for what is undecided.
        floor = self.length if self.undecided is None else min(self.undecided, self.length)
        committed = [p for p in self._passes if p.start < self.length and p.start + p.rows > floor < self.length]
        self._passes = committed[-_UNDOABLE_PASSES:] + [p for p in self._passes if p.start >= self.length]
        this = _Pass(self.held, width, ids, [leaf.mark() for leaf in self._leaves], None)
        self._passes.append(this)
        with self._listening(rows):
            if self._recorder is None or width == 1:
                logits = self._run(ids)
            else:
                with self._recorder.recording(width) as recording:
                    logits = self._run(ids)
                if recording.complete:
                    this.recording = recording
                else:
                    self._recorder, self.rollback = None, "replay"
        self.held += rows
        self._fillers = width - rows
        return logits[:rows]

    def prefill(self, ids: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Run `ids` into the caches and commit them; no logits. `progress` is called with the tokens done so far."""
        self._passes = []
        done = 0
        while done < len(ids):
            self._quantize_if_due()
            rows = min(PREFILL_STEP, len(ids) - done, self._rows_before_conversion())
            chunk = mx.array(list(ids[done : done + rows]), mx.uint32)
            # Noted like any pass, for `abort` should it fail.
            self._passes = [_Pass(self.held, rows, chunk, [leaf.mark() for leaf in self._leaves], None)]
            with self._listening(rows):
                self._target.forward(chunk, self.caches)
            self.evaluate()
            self.held += rows
            self.length = self.held
            self._passes = []
            mx.clear_cache()
            done += rows
            if progress is not None:
                progress(done)

    def rows_allowed(self) -> int:
        """Most rows, fillers not counted, that the next pass may have: passes end where the caches are to be converted.

        Fillers may stand beyond that place: they are gone before the conversion.
        """
        sizes, allowed = self._sizes(), self._rows_before_conversion()
        return allowed if sizes is None else min(allowed, sizes.largest)

    def commit(self, length: int, in_flight: int = 0) -> None:
        """Keep the first `length` tokens of what the caches hold, and take the rest back.

        `in_flight`: rows behind those which belong to a pass that is still under way; they stay, uncommitted. Raises
        CacheError, naming the layer, when a cache does not follow.
        """
        if not self.rewind(length + in_flight):
            raise ValueError(f"no pass to go back to: {self.held} tokens held, {length + in_flight} to be kept")
        self.length = length

    def rewind(self, length: int) -> bool:
        """Go back to the first `length` tokens, at most those held; False, having done nothing, when there is no way.

        There always is one to any row of the passes since the last commit, the last committed pass included, and of the
        passes behind `undecided`.
        """
        if length < self._quantized_from:
            return False  # the tokens before the conversion are not there any more as they were
        if length < self.held or (self._fillers and length == self.held):
            # The newest first: rows of an older one beyond its kept ones are not what the caches hold any more.
            found = next((p for p in reversed(self._passes) if p.start <= length < p.start + p.rows), None)
            if found is not None and self._reaches(found, length - found.start):
                self._back_into(found, length - found.start)
                self._passes = [p for p in self._passes if p.start < length]
            elif not self._cut_all(length):
                return False
            self.held, self._fillers = min(self.held, length), 0
            if self.hidden is not None:
                self.hidden.cut(self.held)
        self.length = min(self.length, length)
        return length == self.held

    def abort(self) -> None:
        """After a pass that raised: back to what was committed, layers that the pass did not reach included."""
        if self._recorder is not None:
            self._recorder.release()
        first = next((p for p in self._passes if p.start >= self.length), None)
        if first is not None:
            self._restore(first, 0, check=False)
            self._passes = [p for p in self._passes if p.start < self.length]
        self.held, self._fillers = self.length, 0
        if self.hidden is not None:
            self.hidden.release()
            self.hidden.cut(self.length)

    def evaluate(self) -> None:
        """Compute all that is in the caches, and the hidden states, in the thread that built them."""
        mx.eval([leaf.arrays() for leaf in self._leaves], [] if self.hidden is None else self.hidden.arrays())

    def _listening(self, rows: int) -> AbstractContextManager[None]:
        """For a pass whose first `rows` tokens are the next ones."""
        return nullcontext() if self.hidden is None else self.hidden.listening(self.held, rows)

    def _rows_before_conversion(self) -> int:
        due = self._quantization
        return 2**31 if due is None or self.held >= due.start else due.start - self.held

    def _sizes(self) -> RowClass | None:
        """The sizes that the next pass may have."""
        if self.row_class is None or self._target.positions is None:
            return self.row_class
        return self.row_class.up_to(self._target.positions - self.held)

    def _run(self, ids: mx.array) -> mx.array:
        rows = ids.shape[0]
        # A single row is multiplied by our kernel where it has to come out as in company, else by MLX's fastest.
        ours = self._target.few_rows and (rows > 1 or self.row_class is not None)
        if self.row_class is None and not ours:  # as most passes are: nothing to prepare
            return self._target.forward(ids, self.caches)
        with by_row(1 if self.row_class is None else rows, self._target.shapes), few_rows(rows if ours else 0):
            return self._target.forward(ids, self.caches)

    def _drop_fillers(self) -> None:
        if self._fillers:
            self.rewind(self.held)

    def _quantize_if_due(self) -> None:
        due = self._quantization
        if due is None or self.held < due.start:
            return
        converted = [due.convert(cache) for cache in self.caches]
        # Passes that can still be taken back keep their marks: a quantized cache counts tokens as the old one did.
        leaves = leaves_of(converted)
        snapshots = [leaf for leaf in leaves if isinstance(leaf, SnapshotLeaf)]
        # In one step: after an interrupt all is as before, or all is converted.
        self.caches, self._leaves, self._snapshots, self._quantization, self._quantized_from = (
            converted,
            leaves,
            snapshots,
            None,
            self.held,
        )

    def _back_into(self, last: _Pass, kept: int) -> None:
        if self._snapshots and kept and last.recording is None:
            self._restore(last, 0)
            self._run(last.ids[:kept])
            return
        self._restore(last, kept)
        if self._recorder is not None and last.recording is not None and kept:
            with replaying() if self._target.replay_kernel else nullcontext():
                self._recorder.replay(last.recording, kept)

    def _restore(self, last: _Pass, kept: int, *, check: bool = True) -> None:
        """Snapshots to before the pass, key/value caches to behind its first `kept` rows.

        `check`: every layer has run the passes, or none of their rows.
        """
        for leaf, mark in zip(self._leaves, last.marks, strict=True):
            if isinstance(leaf, CutLeaf):
                # A leaf that the pass did not move has no rows of it: layers may share another's cache, or use none.
                moved = leaf.cache.offset - mark.offset
                ran = self.held + self._fillers - last.start
                if check and moved not in (0, ran):
                    raise CacheError(f"{leaf.name} went on by {moved} tokens of {ran}; start a new conversation")
                leaf.cut(max(moved - kept, 0))
            else:
                leaf.restore(mark)

    def _reaches(self, back_to: _Pass, kept: int) -> bool:
        """Whether every layer still has what it needs behind the first `kept` rows of that pass.

        Of the newest pass, always. Those behind an older one may have dropped the oldest entries of what it had.
        """
        if back_to is self._passes[-1]:
            return True
        return all(
            leaf.can_cut(max(leaf.cache.offset - mark.offset - kept, 0))
            for leaf, mark in zip(self._leaves, back_to.marks, strict=True)
            if isinstance(leaf, CutLeaf)
        )

    def _cut_all(self, length: int) -> bool:
        """Cut every cache to `length` tokens where all can be; False, and nothing done, where not."""
        if self._snapshots or length > self.held:
            return False
        excess = self.held + self._fillers - length
        used = [leaf for leaf in self._leaves if isinstance(leaf, CutLeaf) and leaf.cache.offset]
        if any(leaf.cache.offset != self.held + self._fillers or not leaf.can_cut(excess) for leaf in used):
            return False
        for leaf in used:
            leaf.cut(excess)
        self._passes = []
        return True
