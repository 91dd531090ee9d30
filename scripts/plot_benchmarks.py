"""Draws the plots of docs/performance.md from the JSON beside them (docs/benchmarks/*.json)."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

# The same numbers give the same file, and text stays text.
matplotlib.rcParams |= {"svg.hashsalt": "tinyvllm_jax", "svg.fonttype": "none"}
COLORS = {"mosaic_gpu": "#2a6f97", "xla": "#e09f3e"}


def draw_kernels(document: dict[str, Any], out: Path) -> None:
    """Share of the bound of every case, one bar an implementation."""
    results = document["results"]
    decode = [r for r in results if r["kernel"].endswith("decode")]
    prefill = [r for r in results if r["kernel"].endswith("prefill")]
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.5), width_ratios=(3, 1), layout="constrained")
    for axis, chosen, bound in (
        (axes[0], decode, f"{document['read_gb_per_s']} GB/s read"),
        (axes[1], prefill, f"{document['matmul_tflop_per_s']} TFLOP/s"),
    ):
        labels = list(dict.fromkeys(label(r["case"]) for r in chosen))
        for number, (name, color) in enumerate(COLORS.items()):
            share = {
                label(r["case"]): r["share_of_bound"] for r in chosen if r["implementation"] == name
            }
            places = [i + (number - 0.5) * 0.4 for i in range(len(labels))]
            axis.bar(places, [share.get(x, 0) for x in labels], 0.4, label=name, color=color)
        axis.set_xticks(range(len(labels)), labels, rotation=75, fontsize=8)
        axis.axhline(1, color="#888", linewidth=0.8)
        axis.set_ylim(0, 1.2)
        axis.set_ylabel(f"share of {bound}")
        axis.set_title(chosen[0]["kernel"])
    axes[0].legend(loc="upper left", ncols=2)
    figure.suptitle(f"{document['device']}, jax {document['versions']['jax']}, {document['date']}")
    figure.savefig(out, metadata={"Date": None})


def label(case: dict[str, Any]) -> str:
    if "context" in case:
        return f"{case['heads']}  B={case['batch']} ctx {case['context']}"
    prefix = f" on {case['prefix']}" if case["prefix"] else ""
    return f"{case['heads']}  {case['batch']} x {case['new']}{prefix}"


def draw_throughput(document: dict[str, Any], out: Path) -> None:
    """Output tokens a second of each run, beside the bound."""
    runs, bound = document["output_tokens_per_s"], document["bound_tokens_per_s"]
    figure, axis = plt.subplots(figsize=(6, 2.6), layout="constrained")
    names = [f"run {i + 1}" for i in range(len(runs))]
    bars = axis.barh(names, runs, color=COLORS["mosaic_gpu"])
    axis.bar_label(
        bars, [f"{run:,.0f}  ({run / bound:.0%} of the bound)" for run in runs], padding=4
    )
    axis.axvline(bound, color="#888", linewidth=1)
    axis.set_xlim(0, 1.25 * bound)
    axis.set_xlabel(f"output tokens/s; bound {bound:,.0f}")
    axis.set_title(
        f"{document['requests']} requests, {Path(document['model']).name}, {document['device']}"
    )
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    plt.switch_backend("svg")
    folder = (
        Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs/benchmarks"
    )
    for name, draw in (("kernels_h200", draw_kernels), ("throughput_h200", draw_throughput)):
        draw(json.loads((folder / f"{name}.json").read_text()), folder / f"{name}.svg")
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
