"""Paged attention: the reference against plain numpy, XLA and Mosaic GPU against the reference."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention_decode, paged_attention_prefill
from pallas_kernels.paged_attention import decode_sm90, prefill_sm90
from pallas_kernels.paged_attention.cases import BLOCK_SIZES, HEADS, SMOLLM2, Heads
from pallas_kernels.testing import PagedInputs, edge_contexts, random_inputs, relative_error

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 8e-3, jnp.float16: 2e-3}
PREFILL: dict[str, Any] = {
    "context_lens": [300, 1, 0, 130, 77, 64],
    "query_lens": [260, 1, 0, 2, 77, 33],
}


def inputs(heads: Heads, block_size: int = 16, **settings) -> PagedInputs:
    return random_inputs(
        num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
        block_size=block_size, **settings,
    )  # fmt: skip


def decode(x: PagedInputs, implementation: str, **settings) -> jax.Array:
    return paged_attention_decode(
        x.q, x.k_cache, x.v_cache, x.block_tables, x.context_lens,
        **{"layer": 1, "implementation": implementation, **settings},
    )  # fmt: skip


def prefill(x: PagedInputs, implementation: str, **settings) -> jax.Array:
    return paged_attention_prefill(
        x.q, x.k_cache, x.v_cache, x.block_tables, x.context_lens, x.cu_seqlens_q,
        **{"layer": 1, "implementation": implementation, **settings},
    )  # fmt: skip


def dense(x: PagedInputs, window: int | None) -> np.ndarray:
    """Softmax attention in float64, one row after the other."""
    k_cache, v_cache = (
        np.asarray(c.astype(jnp.float32), np.float64)[1] for c in (x.k_cache, x.v_cache)
    )
    q, tables = np.asarray(x.q.astype(jnp.float32), np.float64), np.asarray(x.block_tables)
    starts, group = np.asarray(x.cu_seqlens_q), x.q.shape[1] // k_cache.shape[1]
    out = np.zeros_like(q)
    for b, context in enumerate(np.asarray(x.context_lens)):
        blocks = tables[b, : -(-context // k_cache.shape[2])]
        k, v = (
            c[blocks].swapaxes(1, 2).reshape(-1, *c.shape[1::2])[:context]
            for c in (k_cache, v_cache)
        )
        for row in range(starts[b], starts[b + 1]):
            position = context - (starts[b + 1] - row)
            if position < 0:
                continue
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(q.shape[1]):
                keys = k[first : position + 1, head // group]
                scores = keys @ q[row, head] * q.shape[2] ** -0.5
                probs = np.exp(scores - scores.max())
                out[row, head] = probs / probs.sum() @ v[first : position + 1, head // group]
    return out


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("heads", [Heads(4, 2, 8), Heads(3, 3, 16), Heads(6, 1, 8)], ids=str)
def test_reference(heads, window):
    settings: dict[str, Any] = {"block_size": 4, "dtype": jnp.float32}
    x = inputs(heads, context_lens=edge_contexts(4, 40), **settings)
    assert relative_error(decode(x, "reference", sliding_window=window), dense(x, window)) < 1e-6
    x = inputs(heads, context_lens=[30, 1, 9, 0, 16], query_lens=[12, 1, 9, 0, 5], **settings)
    assert relative_error(prefill(x, "reference", sliding_window=window), dense(x, window)) < 1e-6


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("heads", [SMOLLM2, Heads(8, 8, 64), Heads(8, 1, 128)], ids=str)
def test_xla(heads, dtype, window):
    x = inputs(heads, context_lens=edge_contexts(16, 600), dtype=dtype)
    got, want = (decode(x, name, sliding_window=window) for name in ("xla", "reference"))
    assert relative_error(got, want) < TOLERANCE[dtype]
    assert (got[0] == 0).all()  # a context of 0
    x = inputs(heads, dtype=dtype, padding_rows=9, **PREFILL)
    got, want = (prefill(x, name, sliding_window=window) for name in ("xla", "reference"))
    assert relative_error(got, want) < TOLERANCE[dtype]
    assert np.isfinite(np.asarray(got, np.float32)).all()


@pytest.mark.parametrize("block_size", [1, 4, *BLOCK_SIZES, 256])
def test_xla_block_sizes(block_size):
    x = inputs(SMOLLM2, block_size, context_lens=[300, 7], dtype=jnp.float32, capacity=512)
    assert relative_error(decode(x, "xla"), decode(x, "reference")) < 2e-6
    x = inputs(SMOLLM2, block_size, dtype=jnp.float32, **PREFILL)
    assert relative_error(prefill(x, "xla"), prefill(x, "reference")) < 2e-6


def test_layer_may_be_traced_and_scale_given():
    x = inputs(SMOLLM2, context_lens=[40, 3], dtype=jnp.float32, num_layers=3)
    for layer in (0, 2):
        traced = jax.jit(lambda i: decode(x, "xla", layer=i, sm_scale=0.3))(jnp.int32(layer))
        want = decode(x, "reference", layer=layer, sm_scale=0.3)
        assert relative_error(traced, want) < 2e-6


def test_a_row_does_not_depend_on_its_place_or_neighbours():
    x = inputs(SMOLLM2, context_lens=[5, 200, 64, 391])
    order = np.array([2, 0, 3, 1])
    moved = PagedInputs(
        x.q[order],
        x.k_cache,
        x.v_cache,
        x.block_tables[order],
        x.context_lens[order],
        x.cu_seqlens_q,
    )
    assert (decode(moved, "xla") == decode(x, "xla")[order]).all()


def test_auto_is_xla_without_hopper(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.default_compute_capability", lambda: None)
    x = inputs(SMOLLM2, context_lens=[40, 3])
    assert (decode(x, "auto") == decode(x, "xla")).all()
    monkeypatch.setattr("pallas_kernels.dispatch.default_compute_capability", lambda: "8.0")
    assert (decode(x, "auto") == decode(x, "xla")).all()
    with pytest.raises(NotImplementedError, match=r"needs compute capability 9\.0.*has 8\.0"):
        decode(x, "mosaic_gpu")


def test_auto_falls_through_what_mosaic_cannot_do(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.default_compute_capability", lambda: "9.0")
    x = inputs(SMOLLM2, context_lens=[40, 3], dtype=jnp.float32)
    assert (decode(x, "auto") == decode(x, "xla")).all()
    with pytest.raises(NotImplementedError, match="float32"):
        decode(x, "mosaic_gpu")
    x = inputs(SMOLLM2, **PREFILL)
    assert (prefill(x, "auto", sliding_window=9) == prefill(x, "xla", sliding_window=9)).all()
    with pytest.raises(NotImplementedError, match="sliding window"):
        prefill(x, "mosaic_gpu", sliding_window=9)


@pytest.mark.parametrize(
    ("heads", "block_size", "message"),
    [
        (Heads(9, 3, 96), 16, "head_dim 64 or 128, not 96"),
        (Heads(32, 2, 64), 16, "at most 8 query heads"),
        (Heads(4, 2, 64), 8, "block size"),
    ],
)
def test_mosaic_names_what_it_cannot_do(heads, block_size, message):
    with pytest.raises(NotImplementedError, match=message):
        decode(inputs(heads, block_size, context_lens=[9]), "mosaic_gpu")


def test_wrong_calls_are_value_errors():
    x = inputs(SMOLLM2, context_lens=[40, 3])
    call = functools.partial(paged_attention_decode, layer=0)
    good = (x.q, x.k_cache, x.v_cache, x.block_tables, x.context_lens)
    for position, bad, message in [
        (0, x.q[0], "q must be"),
        (0, x.q[:1], "1 queries for 2 sequences"),
        (0, x.q[..., :32], "head_dim of q is 32"),
        (0, x.q[:, :8], "8 query heads are not a multiple of 3"),
        (1, x.k_cache[0], "must be alike"),
        (2, x.v_cache.astype(jnp.float32), "must be alike"),
        (3, x.block_tables.astype(jnp.float32), "must be int32"),
        (4, x.context_lens[:1], "context_lens"),
    ]:
        arguments = list(good)
        arguments[position] = bad
        with pytest.raises(ValueError, match=message):
            call(*arguments)
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        call(*good, implementation="cuda")
    with pytest.raises(ValueError, match="sliding_window"):
        call(*good, sliding_window=0)
    with pytest.raises(ValueError, match="cu_seqlens_q must have shape"):
        paged_attention_prefill(*good, x.context_lens, layer=0)


@pytest.mark.parametrize("layer", [-1, 2, True, 0.5, None, "1"])
def test_a_layer_that_is_not_there_is_refused(layer):
    with pytest.raises(ValueError, match="layer must be"):
        decode(inputs(SMOLLM2, context_lens=[3]), "xla", layer=layer)
    with pytest.raises(ValueError, match="layer must be"):
        prefill(inputs(SMOLLM2, **PREFILL), "xla", layer=layer)


@pytest.mark.parametrize("layer", [jnp.array([0, 1]), jnp.float32(1)])
def test_a_layer_array_must_be_an_integer_scalar(layer):
    with pytest.raises(ValueError, match="layer must be an integer scalar"):
        decode(inputs(SMOLLM2, context_lens=[3]), "xla", layer=layer)


def test_integer_queries_are_refused():
    x = inputs(SMOLLM2, context_lens=[3])
    x = dataclasses.replace(x, q=x.q.astype(jnp.int32))
    with pytest.raises(ValueError, match="q must be floating point"):
        decode(x, "xla")


# --- Mosaic GPU without a GPU -------------------------------------------------------------------

INTERPRET = plgpu.InterpretGPUParams()


@pytest.mark.parametrize(
    ("heads", "splits", "window"),
    [(Heads(6, 2, 64), 1, None), (Heads(6, 2, 64), 2, 40), (Heads(2, 2, 128), 1, None)],
)
def test_mosaic_decode_interpreted(heads, splits, window):
    x = inputs(heads, context_lens=[0, 150, 17], poison_slots=False)
    config = decode_sm90.DecodeConfig(tile=64, stages=2, num_splits=splits)
    out = decode_sm90.decode(
        x.q, x.k_cache, x.v_cache, x.block_tables, x.context_lens, jnp.int32(1), sm_scale=0.1,
        sliding_window=window, config=config, interpret=INTERPRET,
    )  # fmt: skip
    want = decode(x, "reference", sm_scale=0.1, sliding_window=window)
    assert relative_error(out, want) < TOLERANCE[jnp.bfloat16]


def test_mosaic_prefill_interpreted():
    x = inputs(
        Heads(4, 2, 64), context_lens=[140, 0, 20], query_lens=[70, 0, 20], poison_slots=False
    )
    out = prefill_sm90.prefill(
        x.q, x.k_cache, x.v_cache, x.block_tables, x.context_lens, x.cu_seqlens_q, jnp.int32(1),
        sm_scale=0.1, interpret=INTERPRET,
    )  # fmt: skip
    assert relative_error(out, prefill(x, "reference", sm_scale=0.1)) < TOLERANCE[jnp.bfloat16]


def lower(function, *shapes, **settings):
    """Mosaic's whole lowering for CUDA; no GPU is needed."""
    return jax.jit(function, **settings).trace(*shapes).lower(lowering_platforms=("cuda",))


def abstract(heads: Heads, block_size: int, dtype, rows: int, batch: int, num_blocks: int = 999):
    cache = jax.ShapeDtypeStruct(
        (2, num_blocks, heads.num_kv_heads, block_size, heads.head_dim), dtype
    )
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    q = jax.ShapeDtypeStruct((rows, heads.num_heads, heads.head_dim), dtype)
    return q, cache, cache, int32(batch, 2048 // block_size), int32(batch)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_mosaic_lowers(heads, block_size, dtype):
    call = functools.partial(paged_attention_decode, layer=1, implementation="mosaic_gpu")
    for batch in (1, 256):  # many splits, and one
        lower(call, *abstract(heads, block_size, dtype, batch, batch))
    call = functools.partial(paged_attention_prefill, layer=1, implementation="mosaic_gpu")
    shapes = abstract(heads, block_size, dtype, 512, 6)
    lower(call, *shapes, jax.ShapeDtypeStruct((7,), jnp.int32))


def test_mosaic_lowers_pools_beyond_int32():
    shapes = abstract(Heads(32, 8, 128), 64, jnp.bfloat16, 64, 64, num_blocks=400_000)
    assert np.prod(shapes[1].shape, dtype=np.int64) > 2**31
    lower(functools.partial(paged_attention_decode, layer=1, implementation="mosaic_gpu"), *shapes)


def test_decode_heuristic():
    config = decode_sm90.default_config
    assert config(64, 8, 128, 2048).num_splits == 1  # enough CTAs: one split is best
    assert config(256, 8, 128, 8192).num_splits == 1
    assert config(8, 8, 128, 2048).num_splits > 1
    assert config(1, 8, 128, 128).num_splits == 1  # nothing to split
    for batch in (1, 8, 64):
        for capacity in (64, 2048, 131072):
            splits = config(batch, 8, 64, capacity).num_splits
            assert splits == 1 or capacity // splits >= 256


# --- on the device ------------------------------------------------------------------------------


def on_cpu(x: PagedInputs) -> PagedInputs:
    """The same arrays on the CPU, where the reference compiles quickly and is independent."""
    cpu = jax.devices("cpu")[0]
    return PagedInputs(*(jax.device_put(getattr(x, f.name), cpu) for f in dataclasses.fields(x)))


def check_on_gpu(heads: Heads, block_size: int, dtype, implementation: str) -> None:
    """Fresh random inputs; NaN in every block that no context reaches."""
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    poison = implementation == "xla"
    settings: dict[str, Any] = {"dtype": dtype, "poison_slots": poison, "seed": seed}
    contexts = edge_contexts(block_size, 1000)
    for repeat in (1, 9):  # several splits, and one
        x = inputs(heads, block_size, context_lens=contexts * repeat, **settings)
        want = decode(on_cpu(x), "reference")
        assert relative_error(decode(x, implementation), want) < TOLERANCE[dtype]
    lens: dict[str, Any] = {
        "context_lens": [1000, 1, 0, 300, 77, 515],
        "query_lens": [1000, 1, 0, 128, 77, 2],
    }
    x = inputs(heads, block_size, **lens, **settings)
    want = prefill(on_cpu(x), "reference")
    assert relative_error(prefill(x, implementation), want) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_gpu_mosaic(heads, block_size):
    check_on_gpu(heads, block_size, jnp.bfloat16, "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [SMOLLM2, HEADS[0]], ids=str)
def test_gpu_mosaic_float16(heads):
    check_on_gpu(heads, 64, jnp.float16, "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("heads", [SMOLLM2, HEADS[0]], ids=str)
def test_gpu_xla(heads, dtype):
    """Asks for full float32 products, which a GPU otherwise rounds to tf32."""
    with jax.default_matmul_precision("highest"):
        check_on_gpu(heads, 64, dtype, "xla")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 100, 5000])
def test_gpu_sliding_window(window):
    x = inputs(HEADS[0], 64, context_lens=edge_contexts(64, 1000), poison_slots=False)
    got = decode(x, "mosaic_gpu", sliding_window=window)
    want = decode(on_cpu(x), "reference", sliding_window=window)
    assert relative_error(got, want) < TOLERANCE[jnp.bfloat16]


@pytest.mark.gpu
def test_gpu_rows_do_not_depend_on_place_or_neighbours():
    x = inputs(HEADS[0], 64, context_lens=[5, 200, 64, 991], poison_slots=False)
    order = np.array([2, 0, 3, 1])
    moved = PagedInputs(
        x.q[order],
        x.k_cache,
        x.v_cache,
        x.block_tables[order],
        x.context_lens[order],
        x.cu_seqlens_q,
    )
    assert (decode(moved, "mosaic_gpu") == decode(x, "mosaic_gpu")[order]).all()


@pytest.mark.gpu
def test_gpu_last_block_of_a_pool_beyond_int32():
    heads, block_size, num_blocks = HEADS[0], 64, 40_000
    shape = (1, num_blocks, heads.num_kv_heads, block_size, heads.head_dim)
    assert np.prod(shape, dtype=np.int64) > 2**31
    small = inputs(heads, block_size, context_lens=[64], num_layers=1, poison_slots=False)
    block = int(small.block_tables[0, 0])
    place = lambda cache: jnp.zeros(shape, jnp.bfloat16).at[:, -1].set(cache[:, block])
    for implementation in ("mosaic_gpu", "xla"):
        out = paged_attention_decode(
            small.q, place(small.k_cache), place(small.v_cache),
            jnp.asarray([[num_blocks - 1]], jnp.int32), small.context_lens, layer=0,
            implementation=implementation,
        )  # fmt: skip
        want = decode(on_cpu(small), "reference", layer=0)
        assert relative_error(out, want) < TOLERANCE[jnp.bfloat16]
