"""Chat turns over one session, so that a turn computes only what the turns before it did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localspec.engine import Engine, Message
from localspec.errors import PromptTooLongError, SettingsError
from localspec.generation import Generation
from localspec.settings import Settings


class Conversation:
    """A chat with one engine. `send` streams the answer; the history keeps what was really yielded."""

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self.system = system
        self.messages: list[Message] = []
        """Turns so far, alternating user and assistant; the system prompt is not among them."""
        self._session = engine.new_session()

    @property
    def context_used(self) -> int:
        """Tokens in the context now."""
        return len(self._session.ids)

    def send(self, text: str, *, on_prefill: Callable[[int, int], None] | None = None, **settings: Any) -> Generation:
        """Answer `text`. Both turns enter the history when the generation ends, however it ends.

        `on_prefill(done, of)` reports the processing of the prompt, in tokens. Raises SettingsError or
        PromptTooLongError before anything runs; the history is unchanged then.
        """
        if not text.strip():
            raise SettingsError("the message is empty")
        self._session.release()  # an answer that was left unfinished enters the history now
        user = {"role": "user", "content": text}
        prompt = self._encode(self.engine.render([*self._opening(), *self.messages, user]))

        def record(generation: Generation) -> None:
            # A turn that failed before its first token leaves no trace; one that was stopped by hand does.
            if generation.tokens or generation.finish_reason is not None or not generation.failed:
                self.messages += [user, {"role": "assistant", "content": generation.text}]

        try:
            return self.engine.generation(
                self._session, prompt, Settings.from_keywords(**settings), on_end=record, on_prefill=on_prefill
            )
        except PromptTooLongError as error:
            if not self.messages:
                raise
            raise PromptTooLongError(f"the conversation is full: {error}") from None

    def reset(self) -> None:
        """Forget all turns."""
        self._session.release()
        self.messages = []
        self._session.clear()

    def _opening(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _encode(self, rendered: str) -> list[int]:
        """Ids of the rendered chat, going on from the ids in the session where their text is its beginning.

        Encoding everything anew could split the model's own words differently, and the caches would be of no use.
        Where an earlier message was edited, what is before the control token before it is kept in the same way.
        """
        tokenizer, known = self.engine.tokenizer, self._session.ids
        control = frozenset(tokenizer.all_special_ids)
        # Text is split into words between control tokens, so what follows one may be encoded by itself.
        ends = [len(known), *(i for i in range(len(known) - 1, 0, -1) if known[i - 1] in control)] if known else []
        for end in ends:
            text = _decode(tokenizer, known[:end])
            if rendered.startswith(text):
                ids = known[:end] + self.engine.tokenize(rendered[len(text) :])
                if _decode(tokenizer, ids) == rendered:
                    return ids
        return self.engine.tokenize(rendered)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
