"""A runner without a device: numpy that does what the compiled steps do, on the staged buffers
alone.

Its "model" maps a whole context to the next token, read back through the block tables. Any block
that is shared, lost or stale therefore changes the output, which tests compare with
`expected_output`.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from tinyvllm_jax.engine.batch import (
    SamplingFields,
    StepShape,
    StepShapes,
    prepare_decode,
    prepare_prefill,
    prepare_sampling,
)
from tinyvllm_jax.engine.llm_engine import LLMEngine
from tinyvllm_jax.engine.scheduler import ScheduledBatch

VOCAB_SIZE = 97


def next_token(context: Sequence[int] | np.ndarray) -> int:
    """The fake model: any change anywhere in the context changes the result."""
    return zlib.crc32(np.asarray(context, np.int32).tobytes()) % VOCAB_SIZE


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request alone gives."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


class FakeStep:
    def __init__(self, tokens: np.ndarray):
        self.tokens = tokens

    def read(self) -> np.ndarray:
        return self.tokens


class FakeRunner:
    """Keeps the cache as one token id a slot, and the last sampled token of each row."""

    def __init__(self, shapes: StepShapes, num_blocks: int, block_size: int, max_num_seqs: int):
        self.shapes = shapes
        self.block_size = block_size
        self.slots = np.full(num_blocks * block_size, -1, np.int64)
        self.last_tokens = np.zeros(max_num_seqs + 1, np.int32)
        self.max_num_seqs = max_num_seqs
        self.batches: list[ScheduledBatch] = []

    def run(self, batch: ScheduledBatch) -> FakeStep:
        self.batches.append(batch)
        tokens = []
        if batch.decode:
            shape = self.shapes.decode_for(len(batch.decode))
            fields = shape.split(prepare_decode(batch.decode, shape, self.block_size))
            known = fields["token_ids"]
            token_ids = np.where(known < 0, self.last_tokens[fields["rows"]], known)
            tokens.append(self._step(batch.decode, shape, fields, token_ids))
        if batch.prefill:
            num_tokens = sum(part.num_tokens for part in batch.prefill)
            shape = self.shapes.prefill_for(num_tokens, len(batch.prefill))
            fields = shape.split(prepare_prefill(batch.prefill, shape, self.block_size))
            assert (fields["token_ids"][:num_tokens] >= 0).all()
            assert fields["cu_seqlens_q"][-1] == num_tokens
            tokens.append(self._step(batch.prefill, shape, fields, fields["token_ids"]))
        return FakeStep(np.concatenate(tokens))

    def _step(self, parts, shape: StepShape, fields, token_ids: np.ndarray) -> np.ndarray:
        live = fields["slot_mapping"] >= 0
        slots = fields["slot_mapping"][live]
        assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
        assert (slots >= self.block_size).all(), "a token in the dummy block"
        self.slots[slots] = token_ids[live]
        sampled = np.zeros(shape.num_seqs, np.int32)
        for i in range(len(parts)):
            positions = np.arange(fields["context_lens"][i])
            blocks = fields["block_tables"][i][positions // self.block_size]
            sampled[i] = next_token(
                self.slots[blocks * self.block_size + positions % self.block_size]
            )
        assert (fields["context_lens"][len(parts) :] == 0).all()
        settings = prepare_sampling(parts, shape.num_seqs, self.max_num_seqs)
        rows = SamplingFields.split(settings)[0]["rows"]
        assert len(set(rows[: len(parts)].tolist()) - {self.max_num_seqs}) == sum(
            p.samples for p in parts
        )
        self.last_tokens[rows] = sampled
        return sampled[: len(parts)]


def make_engine(
    *,
    num_blocks: int = 33,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_num_prefill_seqs: int | None = None,
    tokenizer=None,
    **settings,
) -> LLMEngine:
    """An engine over a FakeRunner."""
    shapes = StepShapes.plan(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        on_gpu=False,
        dtype="float32",
    )
    return LLMEngine(
        FakeRunner(shapes, num_blocks, block_size, max_num_seqs),
        tokenizer,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_prefill_seqs=max_num_prefill_seqs or shapes.max_num_prefill_seqs,
        vocab_size=VOCAB_SIZE,
        **settings,
    )


def run(engine: LLMEngine, *, most_steps: int = 5000) -> None:
    """Steps until idle, checking the invariants after every step."""
    for _ in range(most_steps):
        if not engine.has_unfinished:
            break
        engine.step()
        engine.check_invariants()
    else:
        raise AssertionError(f"not idle after {most_steps} steps")
    manager = engine.scheduler.block_manager
    assert len(manager.free_blocks) == manager.num_usable_blocks, "blocks leaked"
