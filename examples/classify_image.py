"""An image classifier (ViT and its like) compiled by Forge.

    python examples/classify_image.py                               # a small ViT of random weights, a drawn picture
    python examples/classify_image.py path/to/checkpoint photo.jpg

The checkpoint is a local folder that transformers loads, with its image processor. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import forge_ugc


class Logits(torch.nn.Module):
    """float [batch, 3, height, width] to logits [batch, classes]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values).logits


def random_model() -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=64, patch_size=16, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    config.num_labels = 10
    return transformers.ViTForImageClassification(config)


def drawn(size: int) -> torch.Tensor:
    """A picture, in [-1, 1]: rings, each colour about a centre of its own."""
    at = torch.linspace(-1, 1, size)
    rings = [torch.sin(9 * ((at[:, None] - x) ** 2 + (at[None] - x / 2) ** 2).sqrt()) for x in (-0.5, 0.0, 0.5)]
    return torch.stack(rings)[None]


def pixels(folder: Path, image: Path) -> torch.Tensor:
    """The picture as the checkpoint wants it."""
    from PIL import Image

    processor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    return processor(Image.open(image).convert("RGB"), return_tensors="pt")["pixel_values"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a checkpoint's folder")
    parser.add_argument("image", nargs="?", type=Path, help="a picture")
    args = parser.parse_args(arguments)
    if args.model is not None and not args.model.is_dir():
        parser.error(f"{args.model} is no folder")
    transformers.utils.logging.set_verbosity_error()
    if args.model is None:
        print("[random weights: pass a checkpoint's folder for classes that mean something]")
        model = random_model()
    else:
        model = transformers.AutoModelForImageClassification.from_pretrained(args.model, local_files_only=True)
    if args.image is not None:
        inputs = pixels(args.model, args.image)
    else:
        inputs = drawn(model.config.image_size)
    logits = Logits(model.float()).eval()
    with torch.no_grad():
        fast = forge_ugc.compile(logits, inputs)
        got = fast(inputs)
        worst = (got - logits(inputs)).abs().max().item()
    shares = got.softmax(-1)[0]
    for i in shares.argsort(descending=True)[:5].tolist():
        print(f"{shares[i].item():6.1%}  {model.config.id2label.get(i, i)}")
    print(f"[by Forge on {fast.device}; {worst:.1e} from eager; fallbacks: {fast.report['fallbacks'] or 'none'}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
