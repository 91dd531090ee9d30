"""Completes prompts: python scripts/generate.py --prompt "The capital of France is"."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import command_line
import tyro

from tinyvllm_jax.config import EngineConfig
from tinyvllm_jax.outputs import RequestOutput

if TYPE_CHECKING:
    from tinyvllm_jax import LLM

Request = str | list[dict[str, Any]]
"""A prompt, or the messages of a conversation."""


@dataclasses.dataclass(frozen=True)
class Options(command_line.Options):
    """Complete prompts, all of them in one batch.

    Example: generate.py --model smollm2-135m --prompt "Once upon a time" --max-tokens 64
    """

    prompt: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Texts to complete; "-" reads one from standard input."""
    prompts_file: Path | None = None
    """File with a prompt on each line; in a .jsonl file a line is {"prompt": "..."} or
    {"messages": [{"role": "user", "content": "..."}]}. "-" reads lines from standard input."""
    chat: bool = False
    """Put each prompt to the model as a user's message, through its chat template."""
    stream: bool = False
    """Print text as it is generated, one prompt after the other."""
    json: bool = False
    """Print one JSON object for each prompt."""


def read_requests(options: Options) -> list[Request]:
    """The prompts of --prompt, then those of --prompts-file.

    Raises:
      ValueError: there are none, or a line of the file is wrong.
      OSError: the file can't be read.
    """
    prompts = [prompt for group in options.prompt for prompt in group]
    requests: list[Request] = [sys.stdin.read() if p == "-" else p for p in prompts]
    if options.prompts_file is not None:
        requests += read_prompts_file(options.prompts_file)
    if not requests:
        raise ValueError("nothing to do: give --prompt, --prompts-file, or --prompt - for stdin")
    if options.chat:
        requests = [[{"role": "user", "content": r}] if isinstance(r, str) else r for r in requests]
    return requests


def read_prompts_file(path: Path) -> Iterator[Request]:
    """The prompts of a file, blank lines left out."""
    text = sys.stdin.read() if str(path) == "-" else path.read_text()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line.removesuffix("\r")
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(value, dict) or value.keys() not in ({"prompt"}, {"messages"}):
            raise ValueError(f'{where}: must be {{"prompt": ...}} or {{"messages": ...}}')
        request = value.get("prompt", value.get("messages"))
        if not isinstance(request, str if "prompt" in value else list):
            raise ValueError(f"{where}: a prompt is a string, messages are a list")
        yield request


def to_prompt(llm: "LLM", request: Request) -> Any:
    """What LLM.generate and LLM.stream take: the text, or the ids of a conversation."""
    if isinstance(request, str):
        return request
    return {"prompt_token_ids": llm.get_tokenizer().apply_chat_template(request)}


def to_json(index: int, request: Request, output: RequestOutput) -> str:
    """One line of strict JSON about a finished request; times are seconds."""
    completion, metrics = output.outputs[0], output.metrics
    record = {
        "index": index,
        "prompt" if isinstance(request, str) else "messages": request,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(completion.token_ids),
        "token_ids": [int(token_id) for token_id in completion.token_ids],
        "ttft_s": metrics.ttft,
        "latency_s": metrics.latency,
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def title(index: int, requests: Sequence[Request]) -> str:
    request = requests[index]
    text = request if isinstance(request, str) else str(request[-1].get("content", ""))
    text = " ".join(text.split())
    return f"--- {index + 1}/{len(requests)}: {text if len(text) <= 60 else text[:57] + '...'}"


def main(
    argv: Sequence[str] | None = None,
    *,
    make_llm: Callable[[EngineConfig], "LLM"] = command_line.make_llm,
) -> None:
    options = command_line.parse(Options, argv)
    if options.stream and options.json:
        raise ValueError("--json prints finished requests and --stream unfinished ones: use one")
    requests = read_requests(options)
    llm = make_llm(options.engine)
    params = options.sampling_params(llm)
    prompts = [to_prompt(llm, request) for request in requests]
    if options.stream:
        for index, prompt in enumerate(prompts):
            print(title(index, requests))
            length = 0
            for output in llm.stream(prompt, params):
                text = output.outputs[0].text
                print(text[length:], end="", flush=True)
                length = len(text)
            print()
        return
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for index, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        if options.json:
            print(to_json(index, request, output))
        else:
            print(title(index, requests))
            print(output.outputs[0].text)


if __name__ == "__main__":
    command_line.run(main)
