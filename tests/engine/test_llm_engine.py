"""The host loop against a fake device: every request gets the tokens it would get alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import (
    VOCAB_SIZE,
    FakeRunner,
    FakeStep,
    expected_output,
    make_engine,
    run,
)
from tinyvllm_jax.sampling_params import SamplingParams


def add(engine, prompt, **params):
    seq = engine.make_sequence(prompt, SamplingParams(**{"temperature": 0, **params}))
    engine.add(seq)
    return seq


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt + i * i) % VOCAB_SIZE for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 63])
def test_one_request(length):
    engine = make_engine()
    seq = add(engine, prompt_of(length), max_tokens=20)
    run(engine)
    expected = min(20, 64 - length)
    assert seq.output_token_ids == expected_output(prompt_of(length), expected)
    assert seq.finish_reason == "length"


def test_many_requests_share_the_engine():
    engine = make_engine()
    seqs = [add(engine, prompt_of(1 + 5 * i, i), max_tokens=1 + 2 * i) for i in range(9)]
    run(engine)
    for i, seq in enumerate(seqs):
        assert seq.output_token_ids == expected_output(prompt_of(1 + 5 * i, i), 1 + 2 * i)


def test_tiny_pool_preempts_and_recomputes():
    engine = make_engine(num_blocks=11)  # room for about 2.5 of these
    seqs = [add(engine, prompt_of(9, i), max_tokens=8) for i in range(8)]
    run(engine)
    assert all(
        seq.output_token_ids == expected_output(prompt_of(9, i), 8) for i, seq in enumerate(seqs)
    )


def test_preemption_happens_and_loses_nothing():
    engine = make_engine(num_blocks=13, max_num_seqs=8)
    seqs = [add(engine, prompt_of(4, i), max_tokens=30) for i in range(4)]
    run(engine)
    assert engine.stats.num_preemptions > 0
    assert all(
        seq.output_token_ids == expected_output(prompt_of(4, i), 30) for i, seq in enumerate(seqs)
    )


def test_first_come_first_served():
    engine = make_engine(max_num_seqs=1)
    seqs = [add(engine, prompt_of(3, i), max_tokens=3) for i in range(5)]
    finished = []
    while engine.has_unfinished:
        finished += [seq for seq in engine.step() if seq.is_finished]
    assert finished == seqs


def test_long_prompt_does_not_stall_decodes():
    engine = make_engine(max_num_batched_tokens=8)
    short = add(engine, prompt_of(2), max_tokens=30)
    engine.step()
    add(engine, prompt_of(40, 1), max_tokens=2)
    while not short.is_finished:
        engine.step()
    assert isinstance(engine.runner, FakeRunner)
    batches = engine.runner.batches
    mixed = [b for b in batches if b.decode and b.prefill]
    assert len(mixed) >= 5
    assert all(sum(p.num_tokens for p in b.parts) <= 8 for b in batches)
    run(engine)


def test_eos_stop_token_and_ignore_eos():
    prompt = prompt_of(5)
    free = expected_output(prompt, 12)
    eos, stop = free[3], free[7]
    assert eos not in free[:3] and stop not in free[:7]
    engine = make_engine(eos_token_ids=frozenset({eos}))
    a = add(engine, prompt, max_tokens=12)
    b = add(engine, prompt, max_tokens=12, ignore_eos=True)
    c = add(engine, prompt, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    run(engine)
    assert (a.output_token_ids, a.finish_reason, a.stop_reason) == (free[:4], "stop", None)
    assert (b.output_token_ids, b.finish_reason, b.stop_reason) == (free, "length", None)
    assert (c.output_token_ids, c.finish_reason, c.stop_reason) == (free[:8], "stop", stop)


def test_end_of_sequence_on_the_last_allowed_token_is_a_stop():
    prompt = prompt_of(5)
    eos = expected_output(prompt, 3)[2]
    engine = make_engine(eos_token_ids=frozenset({eos}))
    seq = add(engine, prompt, max_tokens=3)
    run(engine)
    assert seq.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_output_ends_at_max_model_len(max_tokens):
    engine = make_engine()
    seq = add(engine, prompt_of(10), max_tokens=max_tokens)
    run(engine)
    assert len(seq.token_ids) == 64 and seq.finish_reason == "length"


@pytest.mark.parametrize(("length", "outputs"), [(63, 1), (64, 1)])
def test_prompts_at_the_limit(length, outputs):
    engine = make_engine()
    seq = add(engine, prompt_of(length), max_tokens=5)
    run(engine)
    assert seq.output_token_ids == expected_output(prompt_of(length), outputs)


def test_prompt_over_the_limit_names_both_numbers_and_disturbs_nobody():
    engine = make_engine()
    other = add(engine, prompt_of(5), max_tokens=5)
    engine.step()
    with pytest.raises(ValueError, match=r"65 tokens.*max_model_len is 64"):
        add(engine, prompt_of(65))
    run(engine)
    assert other.output_token_ids == expected_output(prompt_of(5), 5)


def test_request_that_never_fits_the_pool_is_refused():
    engine = make_engine(num_blocks=5)
    with pytest.raises(ValueError, match=r"5 blocks of 4.*has 4 blocks"):
        add(engine, prompt_of(17), max_tokens=1)
    with pytest.raises(ValueError, match="lower max_tokens"):
        add(engine, prompt_of(4), max_tokens=14)
    seq = add(engine, prompt_of(4), max_tokens=13)  # the last token needs no slot: 16 slots
    run(engine)
    assert seq.output_token_ids == expected_output(prompt_of(4), 13)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, -1], "token id -1"),
        ([VOCAB_SIZE], f"token id {VOCAB_SIZE}, outside the vocabulary"),
        ([1.5], "integers, got 1.5"),
        ([True], "integers, got True"),
        ([None], "integers, got None"),
        (["a"], "integers, got 'a'"),
        (7, "got int"),
        (None, "got NoneType"),
        (b"abc", "got bytes"),
        ("text", "needs a tokenizer"),
        ({"prompt_token_ids": "abc"}, "wrong type"),
        ({"prompt": [1]}, "wrong type"),
        ({"tokens": [1]}, "prompt dict"),
    ],
)
def test_bad_prompts_are_refused(prompt, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.make_sequence(prompt, SamplingParams())


def test_stop_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"stop_token_ids holds token id 97"):
        add(make_engine(), [1], stop_token_ids=[97])


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        add(make_engine(), [1], stop=["x"])


def test_numpy_ids_are_integers():
    engine = make_engine()
    seq = add(engine, list(np.arange(1, 6)), max_tokens=4)
    run(engine)
    assert seq.output_token_ids == expected_output(range(1, 6), 4)


@pytest.mark.parametrize("step", range(9))
def test_abort_at_every_step(step):
    engine = make_engine(max_num_batched_tokens=6)
    seqs = [add(engine, prompt_of(10, i), max_tokens=6) for i in range(3)]
    for _ in range(step):
        engine.step()
    engine.abort(seqs[1])
    engine.check_invariants()
    assert seqs[1].finish_reason == "abort"
    run(engine)
    for i in (0, 2):
        assert seqs[i].output_token_ids == expected_output(prompt_of(10, i), 6)


def test_a_failing_step_takes_only_its_own_requests():
    engine = make_engine(max_num_seqs=1)
    first, second = add(engine, prompt_of(3), max_tokens=5), add(engine, prompt_of(4), max_tokens=5)
    real = engine.runner.run

    def fail(batch):
        engine.runner.run = real
        raise RuntimeError("device lost")

    engine.step()
    engine.runner.run = fail
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    engine.check_invariants()
    assert first.finish_reason == "abort"
    run(engine)
    assert second.output_token_ids == expected_output(prompt_of(4), 5)


def test_a_step_that_fails_when_read_takes_only_its_own_requests(monkeypatch):
    engine = make_engine()
    seq = add(engine, prompt_of(3), max_tokens=5)
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(FakeStep, "read", lambda self: (_ for _ in ()).throw(RuntimeError("lost")))
        engine.step()
    assert seq.finish_reason == "abort"
    engine.check_invariants()
    again = add(engine, prompt_of(3), max_tokens=5)
    run(engine)
    assert again.output_token_ids == expected_output(prompt_of(3), 5)


def test_requests_without_a_seed_get_different_ones_reproducibly():
    seeds = [
        [add(make, [1]).seed for _ in range(3)]
        for make in (make_engine(seed=5), make_engine(seed=5))
    ]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3
    assert add(make_engine(), [1], seed=42).seed == 42


requests = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.integers(1, 24),
        st.integers(0, 12),
        st.one_of(st.none(), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(17, 40),
    block_size=st.sampled_from([4, 8]),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(7, 40),
    prefill_seqs=st.integers(1, 4),
)
def test_any_traffic_ends_with_every_request_right(
    requests, num_blocks, block_size, max_num_seqs, budget, prefill_seqs
):
    """Requests arrive and are aborted at random steps, over pools of all sizes."""
    engine = make_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_prefill_seqs=prefill_seqs,
    )
    seqs, step = [], 0
    pending = sorted(enumerate(requests), key=lambda item: item[1][2])
    while pending or engine.has_unfinished:
        while pending and pending[0][1][2] <= step:
            i, (length, max_tokens, _, abort_after) = pending.pop(0)
            seq = add(engine, prompt_of(length, i), max_tokens=max_tokens)
            seqs.append((seq, i, None if abort_after is None else step + abort_after))
        for seq, _, abort_at in seqs:
            if abort_at == step:
                engine.abort(seq)
        engine.step()
        engine.check_invariants()
        step += 1
        assert step < 3000, "livelock"
    manager = engine.scheduler.block_manager
    assert len(manager.free_blocks) == manager.num_usable_blocks
    for seq, i, _ in seqs:
        assert seq.is_finished
        length, max_tokens = requests[i][:2]
        right = expected_output(prompt_of(length, i), min(max_tokens, max(1, 64 - length)))
        if seq.finish_reason == "abort":
            assert seq.output_token_ids == right[: len(seq.output_token_ids)]
        else:
            assert seq.output_token_ids == right
