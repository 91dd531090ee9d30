"""The sampler against exact distributions, and its independence from the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinyvllm_jax.sampling.sampler import SamplingMetadata, filter_logits, sample

INF = np.inf


def metadata(rows: int, **settings) -> SamplingMetadata:
    defaults = {
        "num_tokens": 1, "seed_high": 0, "seed_low": 0, "top_k": 0,
        "temperature": 1.0, "top_p": 1.0, "min_p": 0.0,
    }  # fmt: skip
    arrays = {}
    for name, default in defaults.items():
        dtype = np.float32 if name in ("temperature", "top_p", "min_p") else np.int32
        arrays[name] = jnp.asarray(np.broadcast_to(settings.get(name, default), rows), dtype)
    return SamplingMetadata(**arrays)


def kept(probabilities, *, top_k=0, top_p=1.0, min_p=0.0) -> list[int]:
    logits = jnp.log(jnp.asarray([probabilities], jnp.float32))
    out = filter_logits(logits, jnp.asarray([top_k]), jnp.asarray([top_p]), jnp.asarray([min_p]))
    return np.flatnonzero(np.asarray(out[0]) > -INF).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_p": 0.6}, [2, 3]),  # the token that crosses p stays
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [3]),
        ({"top_p": 0.4}, [3]),
        ({"top_p": 0.41}, [2, 3]),
        ({"top_k": 1}, [3]),
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 1000}, [0, 1, 2, 3]),
        ({"min_p": 0.49}, [1, 2, 3]),
        ({"min_p": 1.0}, [3]),
        ({"top_k": 2, "top_p": 0.5}, [3]),  # .4 of .7 is more than half
        ({"top_k": 3, "min_p": 0.6}, [2, 3]),
        ({"min_p": 0.6, "top_p": 0.58}, [2, 3]),  # .4 of .7 is less than .58
    ],
)
def test_filters(settings, expected):
    assert kept([0.1, 0.2, 0.3, 0.4], **settings) == expected


def test_filters_never_drop_everything():
    assert kept([1.0, 0.0, 0.0], top_k=1, top_p=1e-30, min_p=1.0) == [0]
    assert kept([0.25] * 4, top_p=1e-30) == [0, 1, 2, 3]  # ties with the last one kept are kept


def draw(logits, count: int, mode="filtered", **settings) -> np.ndarray:
    meta = metadata(count, seed_low=np.arange(count), **settings)
    tiled = jnp.tile(jnp.asarray(logits, jnp.float32)[None], (count, 1))
    return np.asarray(jax.jit(sample, static_argnums=2)(tiled, meta, mode))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_frequencies_match_the_exact_distribution(settings):
    """A chi-square test with a fixed sample: it fails for a wrong distribution and never by
    chance.
    """
    rng = np.random.default_rng(0)
    logits, count = rng.normal(size=12) * 1.5, 40_000
    temperature = settings.get("temperature", 1.0)
    p = np.exp(logits / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    keep = p >= settings.get("min_p", 0.0) * p.max()
    keep[order[settings.get("top_k", 0) or 12 :]] = False
    share = np.where(keep, p, 0)[order]
    share /= share.sum()
    keep[order[np.cumsum(share) - share >= settings.get("top_p", 1.0)]] = False
    exact = np.where(keep, p, 0) / p[keep].sum()
    counts = np.bincount(draw(logits, count, **settings), minlength=12)
    assert (counts[~keep] == 0).all()
    chi2 = ((counts - count * exact)[keep] ** 2 / (count * exact)[keep]).sum()
    assert chi2 < 2.5 * max(keep.sum() - 1, 4)


def test_modes_agree():
    logits = jax.random.normal(jax.random.key(0), (32, 50))
    meta = metadata(32, seed_low=np.arange(32), temperature=0.7)
    assert (sample(logits, meta, "random") == sample(logits, meta, "filtered")).all()
    greedy = metadata(32, temperature=0.0)
    for mode in ("greedy", "random", "filtered"):
        assert (sample(logits, greedy, mode) == jnp.argmax(logits, -1)).all()


def test_rows_are_independent_of_place_and_neighbours():
    logits = jax.random.normal(jax.random.key(1), (8, 40))
    seeds, counts = np.arange(8) * 7919, np.arange(8) + 3
    settings = {"temperature": 0.9, "top_k": 9}
    together = sample(
        logits, metadata(8, seed_low=seeds, num_tokens=counts, **settings), "filtered"
    )
    for shuffled in (np.arange(8)[::-1], np.random.default_rng(0).permutation(8)):
        meta = metadata(8, seed_low=seeds[shuffled], num_tokens=counts[shuffled], **settings)
        assert (sample(logits[shuffled], meta, "filtered") == together[shuffled]).all()
    for i in range(8):
        alone = metadata(1, seed_low=seeds[i], num_tokens=counts[i], **settings)
        assert sample(logits[i : i + 1], alone, "filtered")[0] == together[i]


def test_noise_depends_on_every_word_of_seed_and_position():
    logits = jnp.zeros((1, 1000))
    base = {"seed_high": 0, "seed_low": 0, "num_tokens": 0}
    draws = [int(sample(logits, metadata(1, **{**base, name: 1}), "random")[0]) for name in base]
    draws.append(int(sample(logits, metadata(1, **base), "random")[0]))
    assert len(set(draws)) == 4


def test_mixed_rows():
    logits = jax.random.normal(jax.random.key(2), (4, 30))
    temperature = np.array([0.0, 1.0, 0.0, 1.0])
    tokens = sample(logits, metadata(4, temperature=temperature, seed_low=np.arange(4)), "random")
    assert (tokens[::2] == jnp.argmax(logits, -1)[::2]).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_extreme_logits_stay_finite(scale):
    logits = jax.random.normal(jax.random.key(3), (4, 30)) * scale
    logits = logits.at[:, :10].set(-INF)
    tokens = sample(
        logits, metadata(4, temperature=0.01, top_p=0.9, seed_low=np.arange(4)), "filtered"
    )
    assert ((tokens >= 10) & (tokens < 30)).all()
