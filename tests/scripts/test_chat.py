"""The chat loop as a user meets it: through a pipe, with Ctrl-C, with answers that are cut off."""

import io
import signal
from typing import Any

import chat
import pytest

from tests.scripts.test_scripts import FakeLLM
from tinyvllm_jax import SamplingParams


def talk(monkeypatch: pytest.MonkeyPatch, capsys, typed: str, *argv: str) -> tuple[str, FakeLLM]:
    """Runs the script with `typed` as standard input; returns what it printed and the model."""
    llm: Any = FakeLLM()
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    chat.main(argv, make_llm=lambda config: llm)
    return capsys.readouterr().out, llm


def test_a_conversation_through_a_pipe(monkeypatch, capsys):
    out, llm = talk(monkeypatch, capsys, "hello\nand?\n/reset\nagain\n", "--system", "be brief")
    assert out == "a b c\na b c\n(the conversation starts over)\na b c\n"
    assert [prompt["prompt_token_ids"] for prompt, _ in llm.seen] == [[2], [4], [2]]


def test_exit_leaves_the_rest_of_the_input_alone(monkeypatch, capsys):
    out, llm = talk(monkeypatch, capsys, "/exit\nhello\n")
    assert out == "" and not llm.seen


def test_the_last_line_may_have_no_line_end(monkeypatch, capsys):
    assert talk(monkeypatch, capsys, "hello")[0] == "a b c\n"


class InterruptedLLM(FakeLLM):
    """Ctrl-C is pressed while the first word of the first answer comes."""

    def __init__(self):
        super().__init__()
        self.closed = False

    def stream(self, prompt, params):
        interrupt = not self.seen
        try:
            for output in super().stream(prompt, params):
                if interrupt:
                    signal.raise_signal(signal.SIGINT)
                    interrupt = False
                yield output
        finally:
            self.closed = True


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation():
    llm: Any = InterruptedLLM()
    written: list[str] = []
    handler = signal.getsignal(signal.SIGINT)
    conversation = chat.Conversation(llm, SamplingParams(), None, written.append)
    assert conversation.handle("hello")
    assert "".join(written) == "a\n(stopped)\n"
    assert llm.closed  # which aborts the request
    assert conversation.messages[-1] == {"role": "assistant", "content": "a"}
    assert signal.getsignal(signal.SIGINT) is handler
    assert conversation.handle("go on")
    assert "".join(written).endswith("a b c\n")


def test_ctrl_c_at_the_prompt_says_how_to_leave(monkeypatch, capsys):
    typed = iter([KeyboardInterrupt, "hello", EOFError])

    def read() -> str:
        value = next(typed)
        if isinstance(value, str):
            return value
        raise value

    monkeypatch.setattr(chat, "line_reader", lambda: read)
    assert talk(monkeypatch, capsys, "")[0] == "\n(/exit or Ctrl-D leaves)\na b c\n"


def test_an_answer_that_was_cut_off_says_so():
    class Brief(FakeLLM):
        def output(self, prompt, text, finished):
            output = super().output(prompt, text, finished)
            output.outputs[0].finish_reason = "length" if finished else None
            return output

    written: list[str] = []
    llm: Any = Brief()
    chat.Conversation(llm, SamplingParams(), None, written.append).handle("hello")
    assert "(cut off after 3 tokens" in written[-1]
