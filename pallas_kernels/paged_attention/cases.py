"""One table of shapes for the tests and the benchmark of paged attention."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Heads:
    """H query heads, K kv heads, h head_dim."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"


QWEN3_06B, LLAMA_8B, LLAMA_1B = Heads(16, 8, 128), Heads(32, 8, 128), Heads(32, 8, 64)
SMOLLM2 = Heads(9, 3, 64)

HEADS = (
    QWEN3_06B,
    LLAMA_8B,
    LLAMA_1B,
    SMOLLM2,
    Heads(8, 8, 64),
    Heads(8, 1, 128),
    Heads(6, 2, 128),
)
BLOCK_SIZES = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class DecodeBenchmark:
    """B sequences with contexts of `context` tokens each."""

    heads: Heads
    batch: int
    context: int


@dataclasses.dataclass(frozen=True)
class PrefillBenchmark:
    """`batch` sequences of `new` tokens on cached prefixes of `prefix` tokens."""

    heads: Heads
    batch: int
    new: int
    prefix: int


DECODE_BENCHMARKS = tuple(
    DecodeBenchmark(heads, batch, context)
    for heads in (LLAMA_8B, QWEN3_06B, LLAMA_1B)
    for batch, context in ((8, 2048), (64, 512), (64, 2048), (64, 8192), (256, 512), (256, 2048))
)
PREFILL_BENCHMARKS = (
    PrefillBenchmark(QWEN3_06B, 1, 4096, 0),
    PrefillBenchmark(QWEN3_06B, 8, 512, 0),
    PrefillBenchmark(QWEN3_06B, 2, 2048, 2048),
    PrefillBenchmark(LLAMA_8B, 1, 4096, 0),
)
