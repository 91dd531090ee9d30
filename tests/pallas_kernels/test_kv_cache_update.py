"""The KV cache update: exact, in place, and nothing else touched."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import store_kv_cache
from pallas_kernels.kv_cache_update import update_sm90

SHAPE = (2, 12, 3, 16, 64)  # L, N, K, S, h


def inputs(num_tokens: int, dtype=jnp.bfloat16, shape=SHAPE, seed: int = 0):
    rng = np.random.default_rng(seed)
    random = lambda *s: jnp.asarray(rng.standard_normal(s, dtype=np.float32), dtype)
    slots = rng.permutation(shape[1] * shape[3])[:num_tokens].astype(np.int32)
    slots[1::5] = -1
    new = (num_tokens, shape[2], shape[4])
    return random(*shape), random(*shape), random(*new), random(*new), jnp.asarray(slots)


def expected(k_cache, v_cache, k, v, slots, layer=1):
    caches = [np.array(c.astype(jnp.float32)) for c in (k_cache, v_cache)]
    block_size = k_cache.shape[3]
    for cache, new in zip(caches, (k, v), strict=True):
        for t, slot in enumerate(np.asarray(slots)):
            if slot >= 0:
                row = np.asarray(new[t].astype(k_cache.dtype).astype(jnp.float32))
                cache[layer, slot // block_size, :, slot % block_size] = row
    return caches


def same(got, want) -> bool:
    return all(
        (np.asarray(g.astype(jnp.float32)) == w).all() for g, w in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("implementation", ["reference", "xla", "auto"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_update(implementation, dtype):
    for num_tokens in (1, 2, 40):
        arrays = inputs(num_tokens, dtype)
        got = store_kv_cache(*arrays, layer=jnp.int32(1), implementation=implementation)
        assert same(got, expected(*arrays))


def test_new_rows_are_cast_to_the_cache():
    k_cache, v_cache, k, v, slots = inputs(7)
    k, v = k.astype(jnp.float32) * 1.001, v.astype(jnp.float32) * 1.001
    got = store_kv_cache(k_cache, v_cache, k, v, slots, layer=1)
    assert same(got, expected(k_cache, v_cache, k, v, slots))


def test_in_place():
    """Donated caches are aliased, and nothing of a layer's size is among the temporaries."""
    shape = (4, 512, 3, 16, 64)
    k_cache, v_cache, k, v, slots = inputs(40, shape=shape)

    def step(k_cache, v_cache, k, v, slots):
        for layer in range(4):
            layer = jnp.int32(layer)
            k_cache, v_cache = store_kv_cache(k_cache, v_cache, k, v, slots, layer=layer)
        return k_cache, v_cache

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(k_cache, v_cache, k, v, slots)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= 2 * k_cache.nbytes
    assert memory.temp_size_in_bytes < k_cache.nbytes / 4


def test_wrong_calls_are_value_errors():
    k_cache, v_cache, k, v, slots = inputs(7)
    for arguments, message in [
        ((k_cache[0], v_cache[0], k, v, slots), "must be alike"),
        ((k_cache, v_cache, k[:6], v, slots), r"k and v \[T, K, h\]"),
        ((k_cache, v_cache, k, v[..., :32], slots), r"k and v \[T, K, h\]"),
        ((k_cache, v_cache, k, v, slots.astype(jnp.float32)), "int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            store_kv_cache(*arguments, layer=0)
    with pytest.raises(NotImplementedError, match="float32"):
        k32, v32 = k_cache.astype(jnp.float32), v_cache.astype(jnp.float32)
        store_kv_cache(k32, v32, k, v, slots, layer=0, implementation="mosaic_gpu")


@pytest.mark.parametrize("layer", [-1, 2, 5])
def test_a_layer_that_is_not_there_is_refused(layer):
    with pytest.raises(ValueError, match=r"layer must be in 0 \.\. 1"):
        store_kv_cache(*inputs(7), layer=layer)


def test_integer_rows_are_refused():
    k_cache, v_cache, k, v, slots = inputs(7)
    with pytest.raises(ValueError, match="k and v must be floating point"):
        store_kv_cache(k_cache, v_cache, k.astype(jnp.int32), v, slots, layer=0)


@pytest.mark.parametrize("num_tokens", [1, 11])
def test_mosaic_interpreted(num_tokens):
    arrays = inputs(num_tokens)
    got = update_sm90.update(*arrays, jnp.int32(1), interpret=plgpu.InterpretGPUParams())
    assert same(got, expected(*arrays))


@pytest.mark.parametrize("num_tokens", [1, 256, 1000, 8192])
@pytest.mark.parametrize("num_blocks", [2048, 400_000])
def test_mosaic_lowers(num_tokens, num_blocks):
    cache = jax.ShapeDtypeStruct((4, num_blocks, 8, 64, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((num_tokens, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    call = functools.partial(store_kv_cache, layer=1, implementation="mosaic_gpu")
    jitted = jax.jit(call, donate_argnums=(0, 1))
    jitted.trace(cache, cache, new, new, slots).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("num_tokens", [1, 8, 100, 513, 1000])
def test_gpu(num_tokens, implementation):
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    arrays = inputs(num_tokens, shape=(2, 40, 8, 64, 128), seed=seed)
    want = expected(*arrays)
    call = functools.partial(store_kv_cache, layer=jnp.int32(1), implementation=implementation)
    assert same(jax.jit(call, donate_argnums=(0, 1))(*arrays), want)
