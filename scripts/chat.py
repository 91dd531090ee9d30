"""A conversation with a model in the terminal: python scripts/chat.py --model smollm2-135m."""

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import command_line

from tinyvllm_jax.config import EngineConfig
from tinyvllm_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyvllm_jax import LLM

HELP = """\
/reset           forget the conversation (the system message stays)
/system TEXT     set the system message and forget the conversation; without TEXT, show it
/help            this list
/exit            leave (Ctrl-D too)
Ctrl-C stops an answer."""


@dataclasses.dataclass(frozen=True)
class Options(command_line.Options):
    """Talk with a model. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.

    Example: chat.py --model smollm2-135m --temperature 0.2
    """

    system: str | None = None
    """System message that the conversation begins with."""


class Conversation:
    """The messages so far, and the commands that change them.

    Args:
      llm: answers through `stream` and its tokenizer's chat template.
      params: of every answer.
      system: the system message, or None.
      write: prints text without a line end.
    """

    def __init__(
        self,
        llm: "LLM",
        params: SamplingParams,
        system: str | None,
        write: Callable[[str], object],
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.write = write
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def handle(self, line: str) -> bool:
        """Obeys a command or answers a message. Returns False when the user wants to leave."""
        command, _, argument = line.strip().partition(" ")
        if not command:
            return True
        if command == "/exit":
            return False
        if command == "/help":
            self.write(HELP + "\n")
        elif command == "/reset":
            self.reset()
            self.write("(the conversation starts over)\n")
        elif command == "/system" and argument.strip():
            self.system = argument.strip()
            self.reset()
            self.write("(the conversation starts over with this system message)\n")
        elif command == "/system":
            self.write(f"{self.system or '(no system message)'}\n")
        elif command.startswith("/"):
            self.write(f"unknown command {command}; /help lists the commands\n")
        else:
            self.answer(line.strip())
        return True

    def answer(self, message: str) -> None:
        """Streams the answer to a message; what was said so far is kept if Ctrl-C stops it."""
        messages = [*self.messages, {"role": "user", "content": message}]
        try:
            ids = self.llm.get_tokenizer().apply_chat_template(messages)
            stream = self.llm.stream({"prompt_token_ids": ids}, self.params)
        except ValueError as error:
            # Most often the conversation has outgrown the context; the message is not kept.
            self.write(f"(not sent: {error}; /reset starts over)\n")
            return
        text, finish_reason, num_tokens = "", None, 0
        with interrupts() as interrupted, contextlib.closing(stream) as outputs:  # pyright: ignore
            for output in outputs:
                completion = output.outputs[0]
                self.write(completion.text[len(text) :])
                text, finish_reason = completion.text, completion.finish_reason
                num_tokens = len(completion.token_ids)
                if interrupted.is_set():
                    break
        self.messages = [*messages, {"role": "assistant", "content": text}]
        self.write("\n")
        if finish_reason is None:
            self.write("(stopped)\n")
        elif finish_reason == "length":
            self.write(
                f"(cut off after {num_tokens} tokens: the limit of --max-tokens or "
                "of the context; /reset starts over)\n"
            )


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event, so that no step of the engine is torn apart; a second
    one raises KeyboardInterrupt."""
    event = threading.Event()

    def on_interrupt(*_: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def line_reader() -> Callable[[], str]:
    """A function that reads a line and raises EOFError at the end: with editing and history on a
    terminal if prompt_toolkit is installed, plain otherwise."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return input
    try:
        from prompt_toolkit import PromptSession
    except ImportError:
        return lambda: input("> ")
    session: PromptSession[str] = PromptSession("> ")
    return session.prompt


def write(text: str) -> None:
    print(text, end="", flush=True)


def main(
    argv: Sequence[str] | None = None,
    *,
    make_llm: Callable[[EngineConfig], "LLM"] = command_line.make_llm,
) -> None:
    options = command_line.parse(Options, argv)
    llm = make_llm(options.engine)
    conversation = Conversation(llm, options.sampling_params(llm), options.system, write)
    read = line_reader()
    if sys.stdin.isatty():
        write(f"{options.engine.model}: /help lists the commands\n")
    while True:
        try:
            if not conversation.handle(read()):
                return
        except EOFError:
            return
        except KeyboardInterrupt:
            write("\n(/exit or Ctrl-D leaves)\n")


if __name__ == "__main__":
    command_line.run(main)
