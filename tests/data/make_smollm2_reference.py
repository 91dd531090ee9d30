"""Makes smollm2_135m_bf16.json: greedy generations of SmolLM2-135M-Instruct by Hugging Face.

Needs torch and transformers, which the tests themselves do not. From the repository's root:

    python -m tests.data.make_smollm2_reference CHECKPOINT

CHECKPOINT is a folder in Hugging Face format with bfloat16 weights, converted from the GGUF file
that README.md names. The prompts are read from the file that is already there. Weights stay the
bfloat16 numbers, all arithmetic is float32, attention is eager, EOS is ignored.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers

MAX_TOKENS = 64
FILE = Path(__file__).parent / "smollm2_135m_bf16.json"


def generate(model: Any, prompt_token_ids: list[int]) -> dict[str, Any]:
    """Greedy generation of MAX_TOKENS tokens with the five best logprobs of every step."""
    output_token_ids, top5, margins = [], [], []
    new_ids, cache = prompt_token_ids, None
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            output = model(torch.tensor([new_ids]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            values, ids = torch.log_softmax(output.logits[0, -1], dim=-1).topk(5)
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            top5.append([[i, round(v, 5)] for i, v in pairs])
            margins.append(float(values[0] - values[1]))
            new_ids = [int(ids[0])]
            output_token_ids += new_ids
    return {
        "output_token_ids": output_token_ids,
        "top5": top5,
        "min_margin": round(min(margins), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.checkpoint, attn_implementation="eager", dtype=torch.float32
    ).eval()

    prompts = []
    for old in json.loads(FILE.read_text())["prompts"]:
        ids = tokenizer.encode(old["prompt"], add_special_tokens=False)
        new = generate(model, ids)
        text = tokenizer.decode(new["output_token_ids"])
        prompts.append(
            {
                "name": old["name"],
                "prompt": old["prompt"],
                "prompt_token_ids": ids,
                "output_token_ids": new["output_token_ids"],
                "output_text": text,
                "top5": new["top5"],
                "min_margin": new["min_margin"],
            }
        )
        print(f"{old['name']:16} {len(ids):5} tokens, min margin {new['min_margin']}", flush=True)
    reference = {
        "model": "smollm2-135m",
        "weights": "bf16",
        "weights_sha256": hashlib.sha256(
            (args.checkpoint / "model.safetensors").read_bytes()
        ).hexdigest(),
        "compute": "float32",
        "attn": "eager",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "add_special_tokens": False,
        "ignore_eos": True,
        "max_tokens": MAX_TOKENS,
        "eos_token_id": model.config.eos_token_id,
        "prompts": prompts,
    }
    text = json.dumps(reference, ensure_ascii=False, separators=(",", ":"))
    args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
