"""Tokenizer and Detokenizer, on tiny tokenizers built here."""

import random
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from tinyvllm_jax.tokenizer import Detokenizer, Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}{{ suffix }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
TEXTS = {
    "ascii": "The quick brown fox.",
    "emoji": "a😀b🚀",
    "zwj family": "👨‍👩‍👧‍👦 ok",
    "hangul": "안녕하세요 세계",
    "combining": "ắ é",
    "arabic and cjk": "مرحبا 你好",
    "replacement character": "a\ufffdb\ufffd",
}


def byte_level() -> Tokenizer:
    """GPT-2's kind: ids below 256 are bytes; then <s> and <e> (special) and <t> (added only)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<e>"])
    backend.add_tokens([AddedToken("<t>", special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>"))


def pieces_tokenizer(pieces: list[str]) -> Tokenizer:
    """Token i is exactly `pieces[i]`."""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = BackendTokenizer(models.WordLevel(vocab=vocab, unk_token=pieces[0]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: words begin with a metaspace, unknown characters fall back to byte tokens."""
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    words += ["▁", "▁hello", "▁world", "lo", "!", *string.ascii_lowercase]
    backend = BackendTokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


BYTES = byte_level()
SENTENCEPIECE = sentencepiece()


def feed(detokenizer: Detokenizer, ids: list[int]) -> tuple[str, str | None]:
    """Streams `ids` until a stop string; returns the joined deltas and the stop string."""
    streamed, stop = "", None
    for id_ in ids:
        stop = detokenizer.append(id_)
        streamed += detokenizer.delta(finished=stop is not None)
        if stop is not None:
            break
    stop = stop or detokenizer.finish()
    return streamed + detokenizer.delta(finished=True), stop


def by_characters(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The oracle: looks for a stop string after each character."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


# --- Tokenizer


@pytest.mark.parametrize("tokenizer", [BYTES, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens_around_the_text() -> None:
    assert SENTENCEPIECE.encode("hi")[0] == 1
    assert 1 not in SENTENCEPIECE.encode("hi", add_special_tokens=False)


def test_decode_can_show_special_tokens() -> None:
    ids = BYTES.encode("a<e>b<t>")
    assert ids == [97, 257, 98, 258]
    assert BYTES.decode(ids) == "ab<t>"
    assert BYTES.decode(ids, skip_special_tokens=False) == "a<e>b<t>"


def test_sizes_and_eos() -> None:
    assert (BYTES.vocab_size, BYTES.eos_token_id) == (259, 257)
    assert pieces_tokenizer(["a"]).eos_token_id is None


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="not a fast tokenizer"):
        Tokenizer(object())  # pyright: ignore[reportArgumentType]


# --- chat templates


def test_chat_template_gives_a_list_of_ids() -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = BYTES.apply_chat_template(messages, chat_template=CHAT_TEMPLATE)
    assert type(ids) is list
    assert BYTES.decode(ids, skip_special_tokens=False) == "<s>user:hi<e><s>assistant:"
    ids = BYTES.apply_chat_template(
        messages, chat_template=CHAT_TEMPLATE, add_generation_prompt=False, suffix="!"
    )
    assert BYTES.decode(ids, skip_special_tokens=False) == "<s>user:hi!<e>"


def test_chat_template_of_the_model() -> None:
    tokenizer = byte_level()
    tokenizer.hf_tokenizer.chat_template = CHAT_TEMPLATE
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "user:hiassistant:"


def test_no_chat_template() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        BYTES.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("messages", [[], "hi", ["hi"], [{"content": "hi"}], {"role": "user"}])
def test_malformed_messages(messages: object) -> None:
    with pytest.raises(ValueError, match="messages must be like"):
        BYTES.apply_chat_template(messages, chat_template=CHAT_TEMPLATE)  # pyright: ignore


def test_the_template_refuses_the_conversation() -> None:
    with pytest.raises(ValueError, match="no robots"):
        BYTES.apply_chat_template([{"role": "robot", "content": ""}], chat_template=CHAT_TEMPLATE)


def test_reserved_template_arguments() -> None:
    with pytest.raises(ValueError, match="tokenize"):
        BYTES.apply_chat_template(
            [{"role": "user", "content": ""}], chat_template=CHAT_TEMPLATE, tokenize=False
        )


# --- incremental text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_stream_equals_decode_however_it_is_truncated(text: str) -> None:
    ids = BYTES.encode(text)
    for length in range(len(ids) + 1):
        detokenizer = BYTES.detokenizer()
        assert feed(detokenizer, ids[:length]) == (detokenizer.text, None)
        assert detokenizer.text == BYTES.decode(ids[:length])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_byte_fallback_stream_however_it_is_truncated(text: str) -> None:
    """Decoded at once, an unfinished character turns all bytes before it into U+FFFD as well; a
    stream keeps the characters that were finished."""
    ids = SENTENCEPIECE.encode(text)
    for length in range(len(ids) + 1):
        detokenizer = SENTENCEPIECE.detokenizer()
        assert feed(detokenizer, ids[:length]) == (detokenizer.text, None)
        finished = detokenizer.text.rstrip("\ufffd")
        assert text.startswith(finished)
    assert detokenizer.text == text


def test_an_unfinished_character_is_flushed_once() -> None:
    detokenizer = BYTES.detokenizer()
    for byte in "a안".encode()[:-1]:
        detokenizer.append(byte)
    assert detokenizer.text == "a"
    assert detokenizer.delta(finished=False) == "a"
    assert detokenizer.finish() is None
    assert detokenizer.finish() is None
    assert detokenizer.delta(finished=True) == "\ufffd"
    assert detokenizer.delta(finished=True) == ""
    assert detokenizer.text == "a\ufffd"


def test_no_token_after_the_end() -> None:
    detokenizer = BYTES.detokenizer(["b"])
    assert [detokenizer.append(i) for i in b"ab"] == [None, "b"]
    with pytest.raises(ValueError, match="after the end"):
        detokenizer.append(97)


def test_a_bad_byte_after_a_good_one() -> None:
    """Byte-fallback decoders take back the good byte, which was already streamed: it stays."""
    first_byte = SENTENCEPIECE.hf_tokenizer.convert_tokens_to_ids("<0x00>")
    ids = [first_byte + b for b in (0x41, 0xE4, 0x42)] + SENTENCEPIECE.encode(" hello")[1:]
    assert SENTENCEPIECE.decode(ids).startswith("\ufffd" * 3)
    streamed, _ = feed(SENTENCEPIECE.detokenizer(), ids)
    assert streamed.startswith("A")
    assert streamed.endswith("hello")


def test_special_tokens_in_the_stream() -> None:
    ids = BYTES.encode("a<e>b<t>c")
    assert feed(BYTES.detokenizer(), ids)[0] == "ab<t>c"
    assert feed(BYTES.detokenizer(skip_special_tokens=False), ids)[0] == "a<e>b<t>c"


def test_ids_outside_the_tokenizer_have_no_text() -> None:
    """Logits can be wider than the vocabulary."""
    assert feed(BYTES.detokenizer(), [97, 100_000, 98]) == ("ab", None)


# --- stop strings


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["AB", "C", "DEF", "GH", "IJ", "K"], ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["ABC", "XDEFGHIJY"], ["DEFGHIJ"], "ABCX", "DEFGHIJ"),
        (["S", "TOP", "x"], ["STOP"], "", "STOP"),
        (["STOP"], ["STOP"], "", "STOP"),
        (["a", "fo", "o", "bar"], ["foo", "foobar"], "a", "foo"),
        (["a", "foobar"], ["foobar", "foo"], "a", "foo"),
        (["a", "fo", "x", "foobaz"], ["foobar", "foobaz"], "afox", "foobaz"),
        (["aaab"], ["aab"], "a", "aab"),
        (["a", "a", "a", "b"], ["aab"], "a", "aab"),
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),
        (["xabc"], ["bc", "abc"], "x", "abc"),
        (["x", "\n", "\n", "y"], ["\n\n"], "x", "\n\n"),
        (["ab", "cd"], ["e"], "abcd", None),
        (["ab", "cd"], ["cde"], "abcd", None),
        (["1.", "2", "3."], [".", "."], "1", "."),
    ],
)
def test_stop_strings(
    pieces: list[str], stops: list[str], text: str, stop: str | None, include: bool
) -> None:
    vocabulary = sorted({*pieces, "?"})
    detokenizer = pieces_tokenizer(vocabulary).detokenizer(
        stops, include_stop_str_in_output=include
    )
    expected = text + (stop or "") if include else text
    assert feed(detokenizer, [vocabulary.index(p) for p in pieces]) == (expected, stop)
    assert detokenizer.text == expected


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    detokenizer = BYTES.detokenizer(["</think>"])
    deltas = []
    for byte in b"a </b> </thin":
        detokenizer.append(byte)
        deltas.append(detokenizer.delta(finished=False))
    assert deltas == ["a", " ", "", "", "</b", ">", " ", *[""] * 6]
    assert detokenizer.delta(finished=True) == "</thin"


def test_an_included_stop_string_holds_nothing_back() -> None:
    detokenizer = BYTES.detokenizer(["stop"], include_stop_str_in_output=True)
    detokenizer.append(ord("s"))
    assert detokenizer.delta(finished=False) == "s"


def test_a_stop_string_that_the_flush_completes() -> None:
    """A token that ends inside a character has no text until the flush."""
    assert BYTES.detokenizer(["\ufffd"]).finish() is None
    assert feed(BYTES.detokenizer(["\ufffd"]), [*b"ab", 0xE2]) == ("ab", "\ufffd")


def test_a_stop_string_of_several_bytes() -> None:
    assert feed(BYTES.detokenizer(["停"]), list("是停不".encode())) == ("是", "停")


@pytest.mark.parametrize("stop", ["abc", ["a", ""]])
def test_wrong_stop_strings(stop: str | list[str]) -> None:
    with pytest.raises(ValueError, match="non-empty strings"):
        BYTES.detokenizer(stop)


# --- properties


@given(st.lists(st.integers(0, 258), max_size=40), st.booleans())
@example([0xED, 0xA0, 0x80, 0x41], True)  # a surrogate, which UTF-8 forbids
@example([0xF0, 0x9F, 0x98, 257, 0x80], True)  # a special token inside a character
@example([0xEF, 0xBF, 0xBD, 0x41], True)  # a real U+FFFD
def test_any_bytes_stream_as_they_decode(ids: list[int], skip_special_tokens: bool) -> None:
    detokenizer = BYTES.detokenizer(skip_special_tokens=skip_special_tokens)
    text = BYTES.decode(ids, skip_special_tokens=skip_special_tokens)
    assert feed(detokenizer, ids) == (text, None)


@given(st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), max_size=40))
def test_any_byte_fallback_ids_stream_to_the_final_text(ids: list[int]) -> None:
    detokenizer = SENTENCEPIECE.detokenizer()
    assert feed(detokenizer, ids) == (detokenizer.text, None)


@given(st.text(max_size=20))
def test_any_text_streams_as_it_is(text: str) -> None:
    for tokenizer in (BYTES, SENTENCEPIECE):
        ids = tokenizer.encode(text)
        assert feed(tokenizer.detokenizer(), ids)[0] == tokenizer.decode(ids)


@given(
    st.lists(st.text("abc\n", min_size=1, max_size=3), max_size=10),
    st.lists(st.text("abc\n", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_token_boundaries(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    vocabulary = sorted({*pieces, "?"})
    ids = [vocabulary.index(p) for p in pieces]
    detokenizer = pieces_tokenizer(vocabulary).detokenizer(
        stops, include_stop_str_in_output=include
    )
    expected = by_characters("".join(pieces), stops, include)
    assert feed(detokenizer, ids) == expected
    assert detokenizer.text == expected[0]


def test_long_random_output_in_little_time() -> None:
    """Streaming is linear in the number of tokens (a loop over `decode` would not be)."""
    rng = random.Random(0)
    ids = BYTES.encode("".join(rng.choice("abc 안😀") for _ in range(20_000)))
    detokenizer = BYTES.detokenizer(["never there"])
    assert feed(detokenizer, ids)[0] == BYTES.decode(ids)
