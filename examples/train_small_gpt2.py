"""Train the small GPT-2 that this repository ships in examples/small_gpt2.

The text is the King James Bible (1611, public domain) as Debian packages it:

    apt-get install bible-kjv-text bible-kjv
    python examples/train_small_gpt2.py --out examples/small_gpt2

A byte-level BPE of 2,048 tokens and a model of about 2 million parameters, saved as an ordinary Hugging Face
checkpoint folder. About 25 minutes on one core. Every 40th chapter is held out of both; the loss on those is printed,
and saved in `training.json` beside the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$")


def read_chapters(text: str | None) -> list[str]:
    """One string a chapter, one line a verse, references removed."""
    if text is None:
        done = subprocess.run(["bible", "-f", "-l", "0", "gen1:1-rev22:21"], capture_output=True, text=True, check=True)
        text = done.stdout
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in text.splitlines():
        match = VERSE.match(line)
        if match:
            book, chapter, _, words = match.groups()
            chapters.setdefault((book, chapter), []).append(words.strip())
    return ["\n".join(verses) + "\n" for verses in chapters.values()]


def train_tokenizer(chapters: list[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        chapters,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, unk_token=END, model_max_length=context
    )


def encode(tokenizer: PreTrainedTokenizerFast, chapters: list[str]) -> torch.Tensor:
    end = tokenizer.eos_token_id
    ids: list[int] = [end]
    for chapter in chapters:
        ids += [*tokenizer.encode(chapter), end]
    return torch.tensor(ids)


def windows(ids: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    return ids[starts[:, None] + torch.arange(context + 1)]


def loss_of(model: GPT2LMHeadModel, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, ids: torch.Tensor, context: int) -> float:
    model.eval()
    starts = torch.arange(0, len(ids) - context - 1, context)
    losses = [loss_of(model, windows(ids, part, context)) for part in starts.split(32)]
    model.train()
    return float(torch.stack(losses).mean())


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is made orthogonal before each step (Newton-Schulz). It needs far fewer steps than AdamW.

    torch.optim.Muon iterates in bfloat16, which costs four times the rest of a step on a CPU; this one uses float32.
    """

    def __init__(
        self, params: list[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(average, group["momentum"])
                wide = x if x.shape[0] <= x.shape[1] else x.T
                wide = wide / (wide.norm() + 1e-7)
                for _ in range(5):
                    square = wide @ wide.T
                    wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
                x = wide if x.shape[0] <= x.shape[1] else wide.T
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x, alpha=-group["lr"] * max(1.0, p.shape[1] / p.shape[0]) ** 0.5)


def optimisers(model: GPT2LMHeadModel, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the rest."""
    matrices, rest = [], []
    for name, p in model.named_parameters():
        (matrices if ".h." in name and p.dim() == 2 else rest).append(p)
    return [Muon(matrices, lr=lr * 4), torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)]


def train(model: GPT2LMHeadModel, ids: torch.Tensor, args: argparse.Namespace) -> None:
    draw = torch.Generator().manual_seed(args.seed)
    groups = optimisers(model, args.lr)
    base = [[g["lr"] for g in o.param_groups] for o in groups]
    model.train()
    start, smooth, order, at = time.time(), None, torch.empty(0, dtype=torch.long), 0
    for step in range(args.steps):
        warm = min(1.0, (step + 1) / 40)
        left = 1 - step / args.steps
        scale = warm * min(1.0, left / 0.5)  # constant, then a linear fall over the second half
        for optimiser, lrs in zip(groups, base, strict=True):
            for group, lr in zip(optimiser.param_groups, lrs, strict=True):
                group["lr"] = lr * scale
        if at + args.batch > len(order):  # a new epoch, cut at another offset
            shift = int(torch.randint(0, args.context, (1,), generator=draw))
            cuts = torch.arange(shift, len(ids) - args.context - 1, args.context)
            order, at = cuts[torch.randperm(len(cuts), generator=draw)], 0
        batch = windows(ids, order[at : at + args.batch], args.context)
        at += args.batch
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in groups:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if step % 50 == 0 or step == args.steps - 1:
            rate = (step + 1) * args.batch * args.context / (time.time() - start)
            print(f"step {step:5d}  loss {smooth:.3f}  {rate:.0f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "small_gpt2")
    parser.add_argument("--text", type=Path, help="output of `bible -f -l 0 gen1:1-rev22:21`; default: run it")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    chapters = read_chapters(args.text.read_text() if args.text else None)
    held = chapters[20::40]
    seen = [c for i, c in enumerate(chapters) if i % 40 != 20]
    tokenizer = train_tokenizer(seen, args.vocab, args.context)
    ids, held_ids = encode(tokenizer, seen), encode(tokenizer, held)

    config = GPT2Config(
        vocab_size=args.vocab,
        n_positions=args.context,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(chapters)} chapters, {len(ids):,} tokens, {len(held_ids):,} more held out; {parameters:,} parameters")
    train(model, ids, args)

    # Half precision halves the file; dtype in config.json makes transformers load it as float32 all the same.
    model.eval().half().float()
    loss = held_out_loss(model, held_ids, args.context)
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    settings = json.loads((args.out / "config.json").read_text())
    settings["dtype"] = "float32"
    (args.out / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    (args.out / "training.json").write_text(
        json.dumps(
            {
                "text": "King James Bible, Debian package bible-kjv-text",
                "parameters": parameters,
                "steps": args.steps,
                "tokens_per_step": args.batch * args.context,
                "seed": args.seed,
                "held_out_loss": round(loss, 4),
                "held_out_perplexity": round(math.exp(loss), 2),
            },
            indent=2,
        )
        + "\n"
    )
    print(f"held-out loss {loss:.3f}, perplexity {math.exp(loss):.1f} a token; saved to {args.out}")


if __name__ == "__main__":
    main()
