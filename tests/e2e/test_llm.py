"""The library as its users hold it, on a tiny random model."""

import gc
import os
import signal
import threading

import numpy as np
import pytest

from tests.tiny_models import write_checkpoint
from tinyvllm_jax import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS = {
    "dtype": "float32", "skip_tokenizer_init": True, "block_size": 8, "max_num_seqs": 4,
    "max_num_batched_tokens": 32, "show_progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, **SETTINGS)


def ids(output) -> list[int]:
    return output.outputs[0].token_ids


def test_forms_of_prompts(llm):
    prompt = [5, 6, 7]
    [one] = llm.generate(prompt, GREEDY, use_tqdm=False)
    [as_dict] = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    several = llm.generate([prompt, (5, 6, 7), np.array(prompt).tolist()], GREEDY, use_tqdm=False)
    assert all(ids(o) == ids(one) for o in [as_dict, *several])
    assert one.prompt_token_ids == prompt and one.prompt is None
    assert one.finished and one.outputs[0].finished() and one.outputs[0].index == 0
    assert one.outputs[0].finish_reason == "length" and one.num_cached_tokens == 0
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_timings_are_in_order(llm):
    [output] = llm.generate([1, 2], GREEDY, use_tqdm=False)
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    assert 0 < m.ttft <= m.latency


def test_params_for_each_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate([[1], [2], [3]], params, use_tqdm=False)
    assert [len(ids(o)) for o in outputs] == [1, 5, 3]
    with pytest.raises(ValueError, match="2 prompts, but 3 sampling_params"):
        llm.generate([[1], [2]], params, use_tqdm=False)
    with pytest.raises(ValueError, match="sampling_params must be"):
        llm.generate([[1]], {"temperature": 0}, use_tqdm=False)


def test_one_bad_prompt_starts_none(llm):
    steps = llm.engine.stats.num_steps
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.generate([[1, 2], [512]], GREEDY, use_tqdm=False)
    assert llm.engine.stats.num_steps == steps and not llm.engine.has_unfinished


def test_default_params_come_from_the_checkpoint(llm):
    recommended = llm._generation_config
    assert recommended["top_k"] == llm.get_default_sampling_params().top_k
    assert recommended["temperature"] == llm.get_default_sampling_params().temperature


def test_unknown_setting_is_a_type_error(checkpoint):
    with pytest.raises(TypeError, match="tensor_parallel"):
        LLM(checkpoint, tensor_parallel=2)


def test_stream_is_cumulative_and_ends_finished(llm):
    steps = list(llm.stream([9, 8, 7], GREEDY))
    assert [len(ids(s)) for s in steps] == sorted(len(ids(s)) for s in steps)
    assert [s.finished for s in steps] == [False] * (len(steps) - 1) + [True]
    assert ids(steps[-1]) == ids(llm.generate([9, 8, 7], GREEDY, use_tqdm=False)[0])


def test_stream_checks_at_the_call(llm):
    with pytest.raises(ValueError, match="empty"):
        llm.stream([], GREEDY)


def test_closing_a_stream_aborts_it(llm):
    stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.scheduler.has_unfinished
    llm.engine.check_invariants()


def test_generate_while_a_stream_is_open(llm):
    right = ids(llm.generate([4, 4, 4], GREEDY, use_tqdm=False)[0])
    stream = llm.stream([4, 4, 4], GREEDY)
    next(stream)
    other = llm.generate([[1, 2], [3]], GREEDY, use_tqdm=False)
    assert all(o.finished for o in other)
    assert ids(list(stream)[-1]) == right


def test_two_engines_in_one_process(llm, checkpoint):
    second = LLM(checkpoint, **{**SETTINGS, "max_num_seqs": 2})
    prompts = [[1, 2, 3], [7] * 40, [100]]
    first = [ids(o) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert [ids(o) for o in second.generate(prompts, GREEDY, use_tqdm=False)] == first
    assert [ids(o) for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == first


def test_interrupt_aborts_and_the_engine_goes_on(llm):
    right = ids(llm.generate([3, 1, 4], GREEDY, use_tqdm=False)[0])
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate([[1], [2], [3]], long, use_tqdm=False)
    assert not llm.engine.scheduler.has_unfinished
    llm.engine.check_invariants()
    assert ids(llm.generate([3, 1, 4], GREEDY, use_tqdm=False)[0]) == right


def test_interrupting_a_stream_leaves_the_engine_whole(llm):
    right = ids(llm.generate([3, 1, 4], GREEDY, use_tqdm=False)[0])
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            for _ in llm.stream([1, 2], long):
                pass
    gc.collect()  # closes the stream that the interrupt left
    assert not llm.engine.scheduler.has_unfinished
    llm.engine.check_invariants()
    assert ids(llm.generate([3, 1, 4], GREEDY, use_tqdm=False)[0]) == right


def test_generate_in_another_thread(llm):
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(llm.generate([[1, 2]], GREEDY, use_tqdm=False))
    )
    thread.start()
    thread.join()
    assert results[0].finished


@pytest.mark.parametrize("blocks", [33, 40])
def test_preemption_changes_nothing(checkpoint, llm, blocks):
    """A cache for one long sequence: others are preempted and computed again."""
    small = LLM(checkpoint, **{**SETTINGS, "num_gpu_blocks_override": blocks})
    prompts = [[i, 2 * i, 3 * i] * 11 for i in range(1, 7)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=60, ignore_eos=True)
    right = [ids(o) for o in llm.generate(prompts, params, use_tqdm=False)]
    assert [ids(o) for o in small.generate(prompts, params, use_tqdm=False)] == right
    assert small.engine.stats.num_preemptions > 0
    small.engine.check_invariants()


def test_nothing_compiles_while_serving(llm, compilations):
    samplers = [
        GREEDY,
        SamplingParams(temperature=1.0, max_tokens=5),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, seed=3, max_tokens=9),
        SamplingParams(max_tokens=4, stop_token_ids=[5, 6]),
    ]
    for lengths in ([1], [2, 70, 250], [3] * 9, [200, 1, 1], [5, 6], list(range(1, 40, 3))):
        prompts = [[7 * i % 500 for i in range(n)] for n in lengths]
        llm.generate(prompts, [samplers[i % 4] for i in range(len(prompts))], use_tqdm=False)
    list(llm.stream([1], samplers[2]))
    assert compilations() == 0


def test_the_cache_is_updated_in_place(llm):
    """Every step aliases the donated cache, and none keeps a copy of it among its temporaries."""
    runner = llm.model_runner
    cache_bytes = runner.cache.k.nbytes + runner.cache.v.nbytes
    for shape, step in runner.steps.items():
        assert step.memory_analysis().alias_size_in_bytes >= cache_bytes, shape
