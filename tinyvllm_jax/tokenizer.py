"""Text to token ids and back: chat templates, incremental detokenization and stop strings.

Invariant: what `Detokenizer.delta` returns, joined, is `Detokenizer.text`; without a stop string
that is what decoding all tokens at once gives (but a character that was complete stays, where a
byte-fallback decoder takes it back because of a bad byte after it). A stop string ends the text at
the same character however its letters are spread over tokens.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Turns the tokens of one request into text, one at a time; made by `Tokenizer.detokenizer`."""

    def __init__(
        self, backend: Any, stop: tuple[str, ...], include_stop: bool, skip_special_tokens: bool
    ) -> None:
        self.text = ""
        """The text so far, without the bytes of an unfinished character, cut at the stop string."""
        self._backend = backend
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._pending = 0  # how many of the last ids have no text yet
        # Unseeded: a stream seeded with a prompt that ends inside a character repeats the prompt.
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._streamed = 0  # how many characters of `text` delta() has returned
        self._finished = False

    def append(self, token_id: int) -> str | None:
        """Adds a token. Returns the stop string that it completed, or None.

        Raises:
          ValueError: the text has ended already.
        """
        if self._finished:
            raise ValueError(f"token {token_id} comes after the end of the text")
        self._ids.append(token_id)
        self._pending += 1
        piece = self._step()
        if piece is None:
            return None
        self._pending = 0
        return self._add(piece)

    def finish(self) -> str | None:
        """Ends the text. The bytes of an unfinished character are added as decoding all tokens at
        once gives them (U+FFFD). Returns the stop string that this completed, or None.
        """
        if self._finished:
            return None
        self._finished = True
        return self._add(self._tail()) if self._pending else None

    def delta(self, finished: bool) -> str:
        """The text since the last call. `finished=True` implies `finish()` and returns all of it;
        before that, what could be the beginning of a stop string is held back.
        """
        if finished:
            self.finish()
        end = len(self.text) - (0 if self._finished else self._held_back())
        piece = self.text[self._streamed : end]
        self._streamed = max(self._streamed, end)
        return piece

    def _step(self) -> str | None:
        """The text that the last token makes certain; None while a character is incomplete."""
        try:
            return self._stream.step(self._backend, self._ids[-1])
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
        # Byte-fallback decoders judge a run of byte tokens as a whole: a bad byte changes text that
        # is already out, and DecodeStream gives up. What is out stays; the rest starts afresh.
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        pieces = [self._stream.step(self._backend, i) for i in self._ids[-self._pending :]]
        return "".join(filter(None, pieces)) or None

    def _tail(self) -> str:
        """The text of the pending tokens."""
        text = self._backend.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
        if text.startswith(self.text):
            return text[len(self.text) :]
        pending = self._ids[-self._pending :]
        return self._backend.decode(pending, skip_special_tokens=self._skip_special_tokens)

    def _add(self, piece: str) -> str | None:
        """Appends `piece` and cuts the text at the first stop string that it completes.

        The stop string that ends first wins, and of two that end together the longer one, as if
        every token were one character. (vLLM takes the first in the list.)
        """
        old_length = len(self.text)
        self.text += piece
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := self.text.find(stop, max(0, old_length - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, start, stop = min(found)
        self.text = self.text[: end if self._include_stop else start]
        self._finished = True
        return stop

    def _held_back(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        if self._include_stop:
            return 0  # a stop string is output like any other text
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if self.text.endswith(tuple(s[:length] for s in self._stop if len(s) > length)):
                return length
        return 0


class Tokenizer:
    """Wraps a fast tokenizer of transformers; ValueError if it is not a fast one."""

    def __init__(self, hf_tokenizer: "PreTrainedTokenizerBase") -> None:
        self._backend: Any = getattr(hf_tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise ValueError(
                f"{type(hf_tokenizer).__name__} is not a fast tokenizer; use a model that has a "
                "tokenizer.json, or convert its tokenizer with transformers"
            )
        self.hf_tokenizer: Any = hf_tokenizer  # Any: its annotations are too loose to be of use
        self.eos_token_id: int | None = self.hf_tokenizer.eos_token_id
        self.vocab_size: int = len(hf_tokenizer)
        """Number of tokens, added ones included; a model's logits may be wider (padding)."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with the special tokens the model expects around it."""
        # verbose=False: no warning about the length; the engine refuses prompts that are too long.
        return self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, without transformers' clean-up of spaces, which would change text that
        was already streamed.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation in the form that the model was trained on.

        Args:
          messages: at least one message with "role" and "content".
          chat_template: Jinja template to use instead of the model's own.
          add_generation_prompt: end with the header of the assistant's turn.
          **kwargs: variables for the template, such as `enable_thinking=False`.

        Raises:
          ValueError: there is no template, a message is malformed, or the template refuses them.
        """
        from jinja2 import TemplateError

        if not chat_template and not self.hf_tokenizer.chat_template:
            raise ValueError(
                "this model has no chat template (it is probably a base model): "
                "pass chat_template=..., or use generate() with a plain prompt"
            )
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise ValueError(
                f'messages must be like [{{"role": "user", "content": "Hi"}}], got {messages!r}'
            )
        try:
            return self.hf_tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,  # transformers 5 would return a dict
                **kwargs,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template can't render these messages: {error}") from error

    def detokenizer(
        self,
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> Detokenizer:
        """A detokenizer for the output of one request that ends at any of the `stop` strings."""
        if isinstance(stop, str) or "" in stop:
            raise ValueError(f"stop must be a list of non-empty strings, got {stop!r}")
        return Detokenizer(
            self._backend, tuple(stop), include_stop_str_in_output, skip_special_tokens
        )
