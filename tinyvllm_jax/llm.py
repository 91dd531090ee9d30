"""LLM: the library's front door. Builds an engine and drives it until the requests are done."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from tinyvllm_jax.config import DEFAULT_MODEL, EngineConfig, ModelConfig
from tinyvllm_jax.engine.llm_engine import LLMEngine, Prompt
from tinyvllm_jax.engine.sequence import Sequence
from tinyvllm_jax.outputs import RequestOutput
from tinyvllm_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyvllm_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class LLM:
    """A model ready to generate.

    Args:
      model: folder, .gguf file, hub id or the demo model's name.
      show_progress: bars while loading and compiling.
      **settings: EngineConfig's other fields.

    Raises:
      TypeError: a keyword that EngineConfig does not have.
      ValueError, NotImplementedError, OSError: a bad setting, an unsupported or a damaged model.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, show_progress: bool = True, **settings: Any):
        config = EngineConfig(model=os.fspath(model), **settings)
        _prepare_jax()
        # Imported here: importing the package must not start a device.
        import jax

        from tinyvllm_jax.engine.model_runner import ModelRunner
        from tinyvllm_jax.loading.load_weights import load_dummy_weights, load_weights
        from tinyvllm_jax.loading.source import open_model

        source = open_model(config.model, revision=config.revision, load_format=config.load_format)
        model_config = ModelConfig.from_hf(source.hf_config)
        self.config = config = config.resolve(
            model_config, on_gpu=jax.default_backend() == "gpu", cpu_has_bf16=_cpu_has_bf16()
        )
        self.tokenizer = None if config.skip_tokenizer_init else _load_tokenizer(config, source)
        if source.weights is None:
            load = lambda model: load_dummy_weights(model, config.seed)
        else:
            weights = source.weights
            load = lambda model: load_weights(model, weights, show_progress=show_progress)
        self.model_config = model_config
        self.model_runner = ModelRunner(config, model_config, load, show_progress=show_progress)
        self._generation_config = source.generation_config
        self.engine = LLMEngine(
            self.model_runner,
            self.tokenizer,
            num_blocks=self.model_runner.num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len or 0,
            max_num_seqs=config.max_num_seqs or 0,
            max_num_batched_tokens=config.max_num_batched_tokens or 0,
            max_num_prefill_seqs=self.model_runner.shapes.max_num_prefill_seqs,
            vocab_size=model_config.vocab_size,
            eos_token_ids=_eos_token_ids(
                self.tokenizer, source.hf_config, source.generation_config
            ),
            seed=config.seed,
        )

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, batched continuously.

        Args:
          prompts: one prompt or a list of them; a flat list of integers is one prompt of token ids.
          sampling_params: for all prompts or one each; None takes the model's recommended settings.
          use_tqdm: show a progress bar.

        Returns:
          One output for each prompt, in order.

        Raises:
          ValueError: a request can't be served; none of the call's requests was started.
        """
        sequences = [
            self.engine.make_sequence(*request)
            for request in self._requests(prompts, sampling_params)
        ]
        self._run(sequences, use_tqdm)
        return [seq.output() for seq in sequences]

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; messages are {"role": ..., "content": ...}.

        Raises:
          ValueError: no chat template, a malformed conversation, or a request that can't be served.
        """
        if not isinstance(messages, Seq) or isinstance(messages, str | bytes) or not messages:
            raise ValueError(
                f"messages must be a conversation or a list of conversations, got {messages!r}"
            )
        one = isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        tokenizer = self.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Completes one prompt, yielding the output so far after each token; the last is
        `finished`.

        Closing the iterator aborts the request.

        Raises:
          ValueError: at the call, if the request can't be served.
        """
        [request] = self._requests([prompt], sampling_params)
        return self._stream(self.engine.make_sequence(*request))

    def _stream(self, seq: Sequence) -> Iterator[RequestOutput]:
        self.engine.add(seq)
        try:
            seen = 0
            while not seq.is_finished:
                with _interrupts_deferred():
                    self.engine.step()
                if not seq.is_finished and len(seq.output_token_ids) > seen:
                    seen = len(seq.output_token_ids)
                    yield seq.output()
            yield seq.output()
        finally:
            self.engine.abort(seq)

    def get_tokenizer(self) -> "Tokenizer":
        """The tokenizer.

        Raises:
          ValueError: the engine was started without one.
        """
        if self.tokenizer is None:
            raise ValueError(
                "this engine has no tokenizer: it was started with skip_tokenizer_init=True"
            )
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the model's generation_config.json recommends."""
        names = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        names["max_new_tokens"] = "max_tokens"
        found = {
            ours: self._generation_config[theirs]
            for theirs, ours in names.items()
            if self._generation_config.get(theirs) is not None
        }
        penalty = self._generation_config.get("repetition_penalty")
        if penalty not in (None, 1, 1.0):
            logger.warning(
                "the model recommends repetition_penalty=%s, which is not supported yet", penalty
            )
        return SamplingParams(**found)

    def _requests(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
    ) -> list[tuple[Prompt, SamplingParams]]:
        listed: Any = prompts
        several = isinstance(prompts, Seq) and not isinstance(prompts, str | bytes)
        if not several or (len(listed) and not isinstance(listed[0], str | dict | Seq)):
            listed = [prompts]
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(listed)
        if not isinstance(sampling_params, Seq) or not all(
            isinstance(p, SamplingParams) for p in sampling_params
        ):
            raise ValueError(
                f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r}"
            )
        if len(sampling_params) != len(listed):
            raise ValueError(f"{len(listed)} prompts, but {len(sampling_params)} sampling_params")
        return list(zip(listed, sampling_params, strict=True))

    def _run(self, sequences: list[Sequence], use_tqdm: bool) -> None:
        """Steps the engine until the sequences are finished; an interrupt or error aborts them
        all.
        """
        start, generated = time.monotonic(), self.engine.stats.generation_tokens
        try:
            for seq in sequences:
                self.engine.add(seq)
            with (
                _interrupts_deferred() as interrupted,
                tqdm(total=len(sequences), desc="Processed prompts", disable=not use_tqdm) as bar,
            ):
                unfinished = sequences
                while unfinished:
                    if any(seq.is_finished for seq in self.engine.step()):
                        unfinished = [seq for seq in unfinished if not seq.is_finished]
                        tokens = self.engine.stats.generation_tokens - generated
                        bar.set_postfix_str(
                            f"{tokens / (time.monotonic() - start):.1f} tok/s", refresh=False
                        )
                        bar.update(len(sequences) - len(unfinished) - bar.n)
                    if interrupted.is_set():
                        break
            self.engine.drain()
        finally:
            for seq in sequences:
                self.engine.abort(seq)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[threading.Event]:
    """Turns Ctrl-C into an event until the end of the block, where it is delivered as usual: so it never
    tears a step apart half done.

    Python delivers signals to the main thread only, and only it may set handlers.
    """
    interrupted = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield interrupted
        return
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted.is_set():
            signal.raise_signal(signal.SIGINT)


def _prepare_jax() -> None:
    """Process-wide settings, unless the user made them; they act only before jax touches a
    device.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
    # XLA warns that a program with a donated cache of half the memory "can't fit": it counts the
    # cache twice. Errors are still shown.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    from tinyvllm_jax.loading.demo_model import cache_dir

    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (x86 on Linux; others use float32)."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def _load_tokenizer(config: EngineConfig, source: Any) -> "Tokenizer":
    from tinyvllm_jax.loading.source import load_tokenizer
    from tinyvllm_jax.tokenizer import Tokenizer

    if config.tokenizer is None:
        return Tokenizer(source.load_tokenizer())
    return Tokenizer(load_tokenizer(config.tokenizer))


def _eos_token_ids(
    tokenizer: "Tokenizer | None", hf_config: Any, generation_config: Mapping[str, Any]
) -> frozenset[int]:
    """End-of-sequence ids from everywhere that names some."""
    found: set[int] = set()
    for value in (
        None if tokenizer is None else tokenizer.eos_token_id,
        getattr(hf_config, "eos_token_id", None),
        generation_config.get("eos_token_id"),
    ):
        found.update([] if value is None else [value] if isinstance(value, int) else value)
    return frozenset(found)
