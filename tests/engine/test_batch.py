"""Staging: what the buffers hold, and the layout that host and device share."""

import numpy as np

from tests.engine.fake_runner import make_engine
from tinyvllm_jax.engine.batch import (
    SamplingFields,
    StepShape,
    prepare_decode,
    prepare_prefill,
    prepare_sampling,
)
from tinyvllm_jax.sampling_params import SamplingParams


def scheduled(prompts, **settings):
    """The first batch of an engine with these prompts, and the engine."""
    engine = make_engine(**{"max_num_batched_tokens": 64, **settings})
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.5, top_k=i, top_p=0.9, min_p=0.1, seed=-1 - i)
        engine.add(engine.make_sequence(prompt, params))
    batch = engine.scheduler.schedule()
    assert batch is not None
    return batch, engine


def test_fields_are_aligned_and_do_not_overlap():
    for shape in (StepShape(8, 8, 33, is_prefill=False), StepShape(64, 3, 7, is_prefill=True)):
        buffer = np.zeros(shape.buffer_size, np.int32)
        start = buffer.__array_interface__["data"][0]
        for number, view in enumerate(shape.split(buffer).values(), start=1):
            assert (view == 0).all()
            assert (view.__array_interface__["data"][0] - start) % 256 == 0
            view[...] = number


def test_prefill():
    batch, _ = scheduled([[1, 2, 3, 4, 5], [6, 7]])
    tables = [part.seq.block_table for part in batch.prefill]
    fields = StepShape(8, 4, 16, is_prefill=True)
    fields = fields.split(prepare_prefill(batch.prefill, fields, block_size=4))
    assert fields["token_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert fields["positions"].tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    slots = [tables[0][p // 4] * 4 + p % 4 for p in range(5)] + [
        tables[1][0] * 4 + p for p in (0, 1)
    ]
    assert fields["slot_mapping"].tolist() == [*slots, -1]
    assert fields["context_lens"].tolist() == [5, 2, 0, 0]
    assert fields["cu_seqlens_q"].tolist() == [0, 5, 7, 7, 7]
    assert fields["last_token_indices"].tolist()[:2] == [4, 6]
    assert fields["block_tables"][0, :2].tolist() == tables[0]


def test_decode_takes_unseen_tokens_from_the_device():
    batch, engine = scheduled([[1, 2, 3, 4], [5]])
    assert [part.seq.num_prompt_tokens for part in batch.decode] == [1]  # one token is a decode
    batch = engine.scheduler.schedule()
    assert batch is not None
    shape = StepShape(8, 8, 16, is_prefill=False)
    fields = shape.split(prepare_decode(batch.decode, shape, block_size=4))
    assert fields["token_ids"].tolist()[:2] == [-1, -1]  # sampled, but not read yet
    assert fields["positions"].tolist()[:2] == [4, 1]
    assert fields["context_lens"].tolist() == [5, 2, 0, 0, 0, 0, 0, 0]
    assert fields["rows"].tolist()[:2] == [part.seq.row for part in batch.decode]
    assert (fields["slot_mapping"][2:] == -1).all()


def test_sampling_rows_of_unfinished_prompts_go_to_the_padding_row():
    batch, _ = scheduled([[1] * 10, [2] * 60], max_num_batched_tokens=40)
    assert [part.samples for part in batch.prefill] == [True, False]
    ints, bits = SamplingFields.split(prepare_sampling(batch.prefill, 4, padding_row=99))
    assert ints["rows"].tolist() == [batch.prefill[0].seq.row, 99, 99, 99]
    assert ints["num_tokens"].tolist() == [10, 0, 0, 0]
    assert [bits["temperature"].view(np.float32)[0], ints["top_k"][0]] == [0.5, 0]
    assert bits["top_p"].view(np.float32)[0] == np.float32(0.9)
    high, low = ints["seed_high"].view(np.uint32)[0], ints["seed_low"].view(np.uint32)[0]
    assert (int(high) << 32 | int(low)) == 2**64 - 1  # a seed of -1, in two words
