"""A language model that writes as you watch: transformers' generate() with a static cache, each step through Forge.

    python examples/chat.py                                    # asks for the beginning of a text, again and again
    python examples/chat.py --prompt "And it came to pass" --compare
    python examples/chat.py path/to/checkpoint --temperature 0.7

The checkpoint is a local folder that transformers loads; without one, the small GPT-2 beside this file. Checkpoints
with a chat template are prompted through it. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import forge_ugc
from forge_ugc.integrations.transformers import compile_config

SMALL_GPT2 = Path(__file__).resolve().parent / "small_gpt2"


class Streamer(transformers.TextStreamer):
    """Prints each word as it is there, and takes the time of the steps after the first two: the prompt and the step
    that compiles are not what a token costs."""

    def __init__(self, tokenizer: Any, quiet: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.quiet = quiet
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())  # of the prompt, of the first token, ...
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if not self.quiet:
            print(text, flush=True, end="\n" if stream_end else "")

    def rate(self) -> float | None:
        """Tokens a second; None if there are too few."""
        times = self.times[2:]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None


def encode(tokenizer: Any, prompt: str, room: int) -> dict[str, torch.Tensor]:
    """The prompt's tokens, at most the last `room` of them."""
    if tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    return {name: inputs[name][:, -room:] for name in ("input_ids", "attention_mask")}


def write(model: Any, tokenizer: Any, inputs: dict[str, torch.Tensor], args: argparse.Namespace, how: str) -> Any:
    """Generates by `how`, "forge" or "eager". Returns the streamer and the tokens."""
    torch.manual_seed(args.seed)
    streamer = Streamer(tokenizer, quiet=how == "eager")
    sampling = dict(do_sample=True, temperature=args.temperature) if args.temperature else dict(do_sample=False)
    tokens = model.generate(
        **inputs,
        max_new_tokens=args.tokens,
        cache_implementation="static",
        compile_config=compile_config() if how == "forge" else None,
        disable_compile=how == "eager",
        streamer=streamer,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **sampling,
    )
    return streamer, tokens


def forge_calls() -> int:
    """How many steps Forge ran; RuntimeError if torch ran any."""
    for graph in forge_ugc.last_reports():
        if graph.fallback or graph.eager_calls:
            raise RuntimeError(f"not all of it ran through Forge: {graph}")
    return sum(graph.calls for graph in forge_ugc.last_reports())


def answer(model: Any, tokenizer: Any, prompt: str, args: argparse.Namespace) -> bool:
    """Writes on from `prompt`. False if eager, asked to compare, wrote something else."""
    longest = getattr(model.config, "max_position_embeddings", None) or args.tokens + 4096
    if longest <= args.tokens:
        raise SystemExit(f"--tokens {args.tokens}: the model takes {longest} tokens in all, the prompt's among them")
    inputs = encode(tokenizer, prompt, longest - args.tokens)
    before = forge_calls()
    streamer, tokens = write(model, tokenizer, inputs, args, "forge")
    new = tokens.shape[1] - inputs["input_ids"].shape[1]
    shown = [("forge", streamer.rate())]
    same = True
    if args.compare:
        streamer, expected = write(model, tokenizer, inputs, args, "eager")
        same = torch.equal(tokens, expected)
        shown.append(("eager", streamer.rate()))
    rates = ", ".join(f"{how} {rate:.1f} tokens/s" for how, rate in shown if rate is not None)
    print(f"[{new} tokens; {forge_calls() - before} steps by Forge; {rates}]")
    if args.compare:
        print("[the same tokens as eager]" if same else "[other tokens than eager: two were about as likely]")
    return same


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], epilog="Without --prompt it reads one a line until the end of input."
    )
    parser.add_argument("model", nargs="?", type=Path, default=SMALL_GPT2, help="a checkpoint's folder")
    parser.add_argument("--prompt", help="write on from this, then stop")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="write at most N tokens (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--compare", action="store_true", help="let eager write too: tokens and tokens/s of both")
    args = parser.parse_args()
    if not args.model.is_dir():
        parser.error(f"{args.model} is no folder")
    if args.tokens < 1 or args.temperature < 0:
        parser.error("--tokens must be at least 1, --temperature at least 0")
    return args


def main() -> int:
    args = parse()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True).eval()
    if args.prompt is not None:
        return 0 if answer(model, tokenizer, args.prompt, args) else 1
    while True:
        try:
            prompt = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if prompt.strip():
            answer(model, tokenizer, prompt, args)


if __name__ == "__main__":
    sys.exit(main())
