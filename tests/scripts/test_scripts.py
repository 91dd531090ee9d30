"""The scripts: flags, config files, prompts, output and errors, with a fake model; and once for real."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import chat
import command_line
import demo
import generate
import pytest
from bench_throughput import Options as ThroughputOptions
from bench_throughput import workload

from tinyvllm_jax import CompletionOutput, EngineConfig, RequestOutput, SamplingParams
from tinyvllm_jax.outputs import RequestMetrics

SCRIPTS = Path(__file__).parents[2] / "scripts"
CONFIGS = Path(__file__).parents[2] / "configs"


class FakeTokenizer:
    def apply_chat_template(self, messages) -> list[int]:
        if sum(len(m["content"]) for m in messages) > 200:
            raise ValueError("the prompt has too many tokens")
        return [len(messages)]


class FakeLLM:
    """Answers every prompt with the words "a b c"."""

    def __init__(self, config: EngineConfig | None = None):
        self.config = config
        self.seen: list[tuple[Any, SamplingParams]] = []

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.25, top_k=7)

    def output(self, prompt, text: str, finished: bool) -> RequestOutput:
        done = CompletionOutput(
            0, text, list(range(len(text.split()))), "stop" if finished else None
        )
        metrics = RequestMetrics(1.0, 1.1, 1.25, 1.5)
        return RequestOutput("0", None, [1, 2], [done], finished, 0, metrics)

    def generate(self, prompts, params, use_tqdm=True) -> list[RequestOutput]:
        self.seen += [(prompt, params) for prompt in prompts]
        return [self.output(prompt, "a b c", True) for prompt in prompts]

    def stream(self, prompt, params):
        self.seen.append((prompt, params))
        texts = ["a", "a b", "a b c"]
        return (self.output(prompt, text, text == texts[-1]) for text in texts)


def run_generate(*argv: str) -> FakeLLM:
    made: list[FakeLLM] = []

    def make(config: EngineConfig) -> Any:
        made.append(FakeLLM(config))
        return made[0]

    generate.main(argv, make_llm=make)
    return made[0]


def test_prompts_from_everywhere(tmp_path, monkeypatch, capsys):
    lines = tmp_path / "prompts.txt"
    lines.write_text("first line\n\nsecond line\r\n")
    records = tmp_path / "prompts.jsonl"
    records.write_text('{"prompt": "p"}\n{"messages": [{"role": "user", "content": "m"}]}\n')
    llm = run_generate("--prompt", "A", "B", "--prompt", "C", "--prompts-file", str(lines))
    assert [prompt for prompt, _ in llm.seen] == ["A", "B", "C", "first line", "second line"]
    llm = run_generate("--prompts-file", str(records))
    assert [prompt for prompt, _ in llm.seen] == ["p", {"prompt_token_ids": [1]}]
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO("from stdin"))
    assert run_generate("--prompt", "-").seen[0][0] == "from stdin"
    assert "--- 1/2: p" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"text": 1}', "must be"),
        ('{"prompt": 1}', "a prompt is a string"),
    ],
)
def test_bad_prompts_files(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        run_generate("--prompts-file", str(tmp_path / "x.jsonl"))


def test_json_output_is_one_strict_object_a_request(capsys):
    run_generate("--prompt", "A", "B", "--json")
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["prompt"] for r in records] == ["A", "B"] and records[1]["index"] == 1
    assert records[0]["text"] == "a b c" and records[0]["finish_reason"] == "stop"
    assert records[0]["ttft_s"] == 0.25 and records[0]["latency_s"] == 0.5


def test_stream_prints_each_character_once(capsys):
    run_generate("--prompt", "A", "--stream")
    assert capsys.readouterr().out == "--- 1/1: A\na b c\n"
    with pytest.raises(ValueError, match="use one"):
        run_generate("--prompt", "A", "--stream", "--json")


def test_options_reach_engine_and_sampling():
    llm = run_generate(
        "--prompt", "A", "--model", "M", "--max-num-seqs", "3", "--max_model_len", "99",
        "--temperature", "0.5", "--stop", "x", "y", "--stop-token-ids", "4", "--ignore-eos",
    )  # fmt: skip
    assert llm.config is not None
    assert (llm.config.model, llm.config.max_num_seqs, llm.config.max_model_len) == ("M", 3, 99)
    params = llm.seen[0][1]
    assert (params.temperature, params.stop_strings) == (0.5, ("x", "y"))
    assert tuple(params.stop_token_ids or ()) == (4,) and params.ignore_eos
    assert params.top_k == 7  # the model's recommendation, which the user did not override


def test_config_file_gives_defaults_and_flags_win(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("max-num-seqs: 5\nblock_size: 32\ntemperature: 0.1\n")
    llm = run_generate("--prompt", "A", "--config", str(file), "--max-num-seqs", "6")
    assert llm.config is not None
    assert (llm.config.max_num_seqs, llm.config.block_size) == (6, 32)
    assert llm.seen[0][1].temperature == 0.1
    file.write_text("max_num_sequences: 5\n")
    with pytest.raises(ValueError, match="'max_num_sequences'; the nearest is 'max_num_seqs'"):
        run_generate("--prompt", "A", "--config", str(file))
    file.write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold"):
        run_generate("--prompt", "A", "--config", str(file))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda f: f.name)
def test_presets_are_valid(file):
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    values = command_line.read_config(file)
    EngineConfig(**{name: value for name, value in values.items() if name in fields})


def converse(*lines: str) -> tuple[str, FakeLLM]:
    written: list[str] = []
    llm: Any = FakeLLM()
    conversation = chat.Conversation(llm, SamplingParams(), "be brief", written.append)
    for line in lines:
        if not conversation.handle(line):
            written.append("[left]")
    return "".join(written), llm


def test_chat_keeps_its_history():
    text, llm = converse("hello", "and?", "/reset", "again", "/system new", "/system", "/exit")
    # system, user; with the answer and the next question; after the reset system and user again.
    assert [prompt["prompt_token_ids"] for prompt, _ in llm.seen] == [[2], [4], [2]]
    assert text.count("a b c\n") == 3 and text.endswith("new\n[left]")


def test_chat_says_what_it_cannot_do():
    text, llm = converse("x" * 300, "/nonsense", "/help", "", "fits")
    assert "(not sent: the prompt has too many tokens; /reset starts over)" in text
    assert "unknown command /nonsense" in text and "Ctrl-C stops an answer" in text
    assert [prompt["prompt_token_ids"] for prompt, _ in llm.seen] == [[2]]


def test_share_of_bandwidth():
    share = demo.read_share(weight_bytes=100, kv_bytes=50, steps=2, seconds=0.5, bandwidth=1000)
    assert share == 0.5  # 250 bytes in half a second


def test_throughput_workload_is_nano_vllms():
    """The totals that nano-vLLM's bench.py draws with the same seed."""
    prompts, outputs = workload(ThroughputOptions(), vocab_size=151936)
    assert (len(prompts), sum(map(len, prompts)), sum(outputs)) == (256, 142827, 133966)


@pytest.mark.parametrize(
    "script",
    ["generate", "chat", "demo", "convert_checkpoint", "bench_throughput", "bench_latency"],
)
def test_help(script):
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{script}.py", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--model" in done.stdout


def test_errors_are_one_line_and_exit_2():
    command = [
        sys.executable,
        SCRIPTS / "generate.py",
        "--model",
        "/no/such/folder",
        "--prompt",
        "x",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    [line] = [text for text in done.stderr.splitlines() if text.startswith("error:")]
    assert "/no/such/folder" in line
    done = subprocess.run([*command, "--temperature", "hot"], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_generate_for_real():
    command = [
        sys.executable,
        SCRIPTS / "generate.py",
        "--prompt",
        "The capital of France is",
        "Hi",
    ]
    command += ["--temperature", "0", "--max-tokens", "8", "--dtype", "float32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert "Paris" in first["text"] and second["num_output_tokens"] == 8
