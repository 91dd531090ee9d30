"""Makes smollm2_tokenizer.json: token ids of awkward texts and of chats, by transformers.

Needs transformers, but no torch. From the repository's root:

    python -m tests.data.make_smollm2_tokenizer TOKENIZER

TOKENIZER is anything that AutoTokenizer.from_pretrained takes; README.md says which was used.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import tokenizers
import transformers

FILE = Path(__file__).parent / "smollm2_tokenizer.json"

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t\tindented\twith\ttabs",
    "Hello",
    " Hello",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "trailing spaces   ",
    "   leading spaces",
    "a  b   c    d     e",
    "line one\nline two\r\nline three\r\n\r\nline five",
    "It's we'll I'm you've they'd can't DON'T she\u2019s",
    "0 12 345 6789 1234567890",
    "3.14159 -42 +7 1e-10 0x1F 1,000,000 50%",
    "x=1;y=22;z=333",
    "\u0661\u0662\u0663 \u0967\u0968\u0969 \u00b2\u00b3 \u00bd \u2167 \uff11\uff12",
    "def f(x: int) -> list[str]:\n    return [str(i) for i in range(x)]\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * b[i];\n}\n",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "<div class='x'>&nbsp;</div> <!-- comment -->",
    "https://example.com/path?query=1&x=%20#fragment user@example.com",
    "$\\frac{a}{b} = \\sum_{i=0}^{n} x_i^2$",
    "!!! ??? ... --- === *** ### @@@",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft",
    "Caf\u00e9 na\u00efve \u00fcber stra\u00dfe \u00c5ngstr\u00f6m",
    "Cafe\u0301 nai\u0308ve A\u030angstro\u0308m",  # the same with combining marks
    "Z\u0351\u036b\u0343a\u0321\u034al\u0322g\u031bo\u0334",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002\u4f60\u597d\uff0c\u4e16\u754c\uff01",
    "\uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600 \U0001f389\U0001f389 \u2764\ufe0f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea",
    "\u201cquotes\u201d \u2018single\u2019 \u2014 em \u2013 en \u2026 \u00ab guillemets \u00bb",
    "no\u00a0break thin\u2009space zero\u200bwidth ideographic\u3000space \ufeffBOM",
    "soft\u00adhyphen \u202eright to left\u202c \ufffd",
    "\U00010348 \U0001d54f \U00020bb7",  # Gothic, mathematical, a Han character of plane 2
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>text <|im_end|> <|im_start|>",
    "<repo_name>a/b<file_sep>main.py\nprint(1)<empty_output>",
    "< |im_end| > <|im_end|<|im_end|>> <|IM_END|>",
    "The same word: word word  word\nword\tword.word",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]

# The vocabulary lacks some of the 256 bytes. This tokenizer drops them without a word.
TEXTS_WITH_MISSING_BYTES = [
    "bell\x07 end of transmission\x04 escape\x1b",
    "plane 8: \U00080000.",
]

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True},
    {
        "messages": [
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        "add_generation_prompt": True,
    },
    {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "  And\n\n10 times that?  "},
        ],
        "add_generation_prompt": True,
    },
    {
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": "\u00bfQu\u00e9 tal? \U0001f600"},
            {"role": "assistant", "content": "\u00a1Muy bien!\n"},
        ],
        "add_generation_prompt": False,
    },
]


def text_entry(tokenizer: Any, text: str) -> dict[str, Any]:
    """Ids, and the decoded text where it is not the text itself."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    entry: dict[str, Any] = {"text": text, "ids": ids}
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    without_special = tokenizer.decode(ids, skip_special_tokens=True)
    if decoded != text:
        entry["decoded"] = decoded
    if without_special != decoded:
        entry["decoded_skip_special_tokens"] = without_special
    return entry


def chat_entry(tokenizer: Any, chat: dict[str, Any]) -> dict[str, Any]:
    """The chat, its rendered text and the ids of that."""
    text = tokenizer.apply_chat_template(**chat_arguments(chat), tokenize=False)
    ids = tokenizer.apply_chat_template(**chat_arguments(chat), return_dict=False)
    if ids != tokenizer.encode(text, add_special_tokens=False):
        raise RuntimeError("the ids of a chat are not the ids of its text")
    return chat | {"text": text, "ids": ids}


def chat_arguments(chat: dict[str, Any]) -> dict[str, Any]:
    return {
        "conversation": chat["messages"],
        "add_generation_prompt": chat["add_generation_prompt"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(parser.parse_args().tokenizer)
    head = {
        "model": "smollm2-135m",
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "vocab_size": len(tokenizer),
        "add_special_tokens": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "unk_token_id": tokenizer.unk_token_id,
    }
    lists = {
        "texts": [text_entry(tokenizer, text) for text in TEXTS],
        "missing_bytes": [text_entry(tokenizer, text) for text in TEXTS_WITH_MISSING_BYTES],
        "chats": [chat_entry(tokenizer, chat) for chat in CHATS],
    }
    parts = [json.dumps(head)[:-1]]
    for key, entries in lists.items():
        lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        parts.append(f'"{key}": [\n{lines}\n]')
    FILE.write_text(", ".join(parts) + "}\n")


if __name__ == "__main__":
    main()
