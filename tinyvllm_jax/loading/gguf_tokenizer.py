"""The tokenizer in a GGUF file's metadata as a transformers fast tokenizer.

Two kinds are built: "gpt2", byte-level BPE, whose pre-tokenizer is known by name alone; and "llama",
SentencePiece BPE, whose merges follow from the scores of the pieces.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tinyvllm_jax.loading.lazy_imports import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Token types of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_CURE = "pass tokenizer= with the model's Hugging Face folder or hub id"

# The regular expressions of the models' own tokenizer.json; they differ in how digits are grouped.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(metadata: dict[str, Any], path: Path) -> "PreTrainedTokenizerBase":
    """Builds the tokenizer; `path` is for messages.

    Raises:
      NotImplementedError: a kind of tokenizer or pre-tokenizer that is not supported.
      ValueError: the metadata is incomplete or contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise NotImplementedError(
            f"{path} has a tokenizer of the kind {kind!r}; gpt2 and llama are supported; {_CURE}"
        )
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"{path} has no tokenizer.ggml.tokens; {_CURE}")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    if not isinstance(types, list) or not len(vocab) == len(tokens) == len(types):
        raise ValueError(
            f"{path} has {len(tokens)} tokens of which {len(vocab)} differ, and {len(types)} token "
            f"types; {_CURE}"
        )
    # llama.cpp's defaults for files that leave them out.
    pre = metadata.get("tokenizer.ggml.pre")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _LLAMA3)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    names: dict[str, str | None] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < len(tokens)):
            raise ValueError(f"{path} has {key}_token_id {token_id!r} and {len(tokens)} tokens")
        names[name] = None if token_id is None else tokens[token_id]
    for name, wanted in (("bos", add_bos), ("eos", add_eos)):
        if wanted and names[name] is None:
            raise ValueError(f"{path} wants a {name} token added and names none; {_CURE}")

    try:
        if kind == "gpt2":
            tokenizer = _byte_level_bpe(vocab, metadata.get("tokenizer.ggml.merges"), pre)
        else:
            scores = metadata.get("tokenizer.ggml.scores")
            add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
            tokenizer = _sentencepiece_bpe(tokens, types, scores, names["unk"], add_prefix)
    except NotImplementedError as e:
        raise NotImplementedError(f"{path}: {e}; {_CURE}") from e
    except Exception as e:  # tokenizers raises bare Exception for impossible merges
        raise ValueError(f"{path} has a corrupt tokenizer: {e}; {_CURE}") from e
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind_of_token == _CONTROL, normalized=False)
            for token, kind_of_token in zip(tokens, types, strict=True)
            # [PAD7]: converters fill the vocabulary up to the embedding's rows with these.
            if kind_of_token in (_CONTROL, _USER_DEFINED) and not re.fullmatch(r"\[PAD\d+\]", token)
        ]
    )
    context_length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{name}_token": token for name, token in names.items()},
        add_bos_token=bool(add_bos),
        add_eos_token=bool(add_eos),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **({"model_max_length": context_length} if context_length else {}),
    )


# --- byte-level BPE -------------------------------------------------------------------------------

_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


def _byte_level_bpe(vocab: dict[str, int], merges: Any, pre: str | None) -> Tokenizer:
    """GPT-2's kind of tokenizer with the pre-tokenizer that llama.cpp calls `pre`."""
    if not isinstance(merges, list):
        raise ValueError("tokenizer.ggml.merges is missing")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if bad := next((pair for pair in pairs if len(pair) != 2), None):
        raise ValueError(f"the merge {' '.join(bad)!r} has {len(bad)} parts instead of 2")
    # Llama 3 takes a word that is in the vocabulary as it is, even if no merge leads to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _LLAMA3))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("gpt-2", "default"):
        tokenizer.pre_tokenizer = gpt2
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    elif pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_WORDS % r"\p{N}"), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre in _LLAMA3:
        split = pre_tokenizers.Split(Regex(_WORDS % r"\p{N}{1,3}"), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        raise NotImplementedError(
            f"pre-tokenizer {pre!r} is not supported; supported are smollm, qwen2, llama-bpe, gpt-2"
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# --- SentencePiece BPE ----------------------------------------------------------------------------


def _sentencepiece_bpe(
    tokens: list[str], types: list[int], scores: Any, unk: str | None, add_prefix: bool
) -> Tokenizer:
    """SentencePiece's BPE: spaces become ▁, characters without a piece become byte tokens.

    `add_prefix` puts a ▁ before the text, and before the text that follows a special token.
    """
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores is not a list of {len(tokens)} numbers")
    merges = _merges_from_scores(tokens, types, scores)
    vocab = {token: i for i, token in enumerate(tokens)}
    byte_fallback = _BYTE in types
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=byte_fallback
        )
    )
    space = normalizers.Replace(" ", "▁")
    prefix = [normalizers.Prepend("▁")] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, space])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Merges that make tokenizers' BPE do what SentencePiece does.

    SentencePiece joins, again and again, the two neighbours whose union is the piece with the highest
    score, the leftmost of equals. So every split of a piece into two pieces is a merge, and its rank
    is the score of the piece (score descending, then id). Only normal pieces take part.
    """
    pieces = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}
    ranked = [
        (-scores[i], i, cut, piece)
        for piece, i in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(piece[:cut], piece[cut:]) for _, _, cut, piece in sorted(ranked)]
