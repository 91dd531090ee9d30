"""tinyvllm_jax: a small LLM inference engine in JAX."""

from tinyvllm_jax.config import EngineConfig
from tinyvllm_jax.llm import LLM
from tinyvllm_jax.outputs import CompletionOutput, RequestOutput
from tinyvllm_jax.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]
