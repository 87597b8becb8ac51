"""The emitted IR of contractions, attention, norms and activations against eager, run by openvino on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.npu_ir import check, emit

SDPA, STACKED, MVN, SPLIT_N, SPLIT_K, SIGNED_SIN, MASK_ARGUMENT, FUSE_PAIR = (1 << k for k in range(8))
ATTENTION_FORMS = (0, SDPA, STACKED, SDPA | STACKED | MASK_ARGUMENT)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


class Linear(torch.nn.Module):
    def __init__(self, n: int, k: int, bias: bool = True, epilogue: bool = False) -> None:
        super().__init__()
        self.eval()
        self.inner = torch.nn.Linear(k, n, bias)
        self.epilogue = epilogue
        with torch.no_grad():
            self.inner.weight.copy_(draw(n, k, seed=1, scale=k**-0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = self.inner(x)
        return torch.tanh(out) * 2 + y if self.epilogue and y is not None else out


# --- linear, matmul, conv --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 5, 32), (2, 3, 5, 32)])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    check(Linear(24, 32, bias), draw(*shape, seed=2))


@pytest.mark.parametrize("arguments", [False, True])
def test_linear_with_epilogue(arguments: bool) -> None:
    check(Linear(24, 32, epilogue=True), draw(2, 5, 32, seed=2), draw(2, 5, 24, seed=3), arguments=arguments)


@pytest.mark.parametrize("arguments", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("w8a16", 0.03), ("w4a16", 0.5)])
def test_quantised_linear(precision: str, tolerance: float, arguments: bool) -> None:
    """Within the quantisation's own error, and not by expanding: the file holds a byte (or half) a weight."""
    n, k = 48, 256
    emitted = check(Linear(n, k), draw(4, k, seed=2), tolerance=tolerance, precision=precision, arguments=arguments)
    folder = emitted.folder
    size = (folder / "model.args").stat().st_size if arguments else (folder / "model.bin").stat().st_size
    weight = n * k // (1 if precision == "w8a16" else 2)
    assert weight < size < weight + 2048


def test_quantised_exactly() -> None:
    """Weights that are multiples of a row's scale come out as they are."""
    model = Linear(6, 16, bias=False)
    levels = torch.randint(-127, 128, (6, 16), generator=torch.Generator().manual_seed(0)).float()
    levels[:, 0] = 127
    scale = torch.tensor([[2.0**-k] for k in range(6)])
    with torch.no_grad():
        model.inner.weight.copy_(levels * scale)
    check(model, draw(3, 16, seed=2), precision="w8a16")


def test_row_of_zeros_quantised() -> None:
    model = Linear(6, 16)
    with torch.no_grad():
        model.inner.weight[2] = 0
    check(model, draw(3, 16, seed=2), precision="w8a16", tolerance=0.05)


def test_transposed_weight() -> None:
    """As GPT-2's Conv1D holds it."""
    weight, bias = draw(32, 24, seed=1), draw(24, seed=3)
    check(lambda x: torch.addmm(bias, x, weight), draw(5, 32, seed=2))


@pytest.mark.parametrize("arguments", [False, True])
@pytest.mark.parametrize("forms", [0, SPLIT_N])
def test_projection_cut_in_three(forms: int, arguments: bool) -> None:
    model = Linear(48, 32)

    def cut(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = model(x).split([32, 8, 8], dim=-1)
        return torch.relu(q), k + 1, v * 2

    emitted = check(cut, draw(2, 5, 32, seed=2), forms=forms, arguments=arguments)
    assert emitted.xml.read_text().count('type="MatMul"') == (3 if forms else 1)


@pytest.mark.parametrize("precision", ["fp16", "w8a16"])
@pytest.mark.parametrize("arguments", [False, True])
@pytest.mark.parametrize("forms", [0, SPLIT_K])
def test_long_contraction(forms: int, arguments: bool, precision: str) -> None:
    tolerance = 0.03 if precision == "w8a16" else None
    how = dict(forms=forms, arguments=arguments, precision=precision, tolerance=tolerance)
    emitted = check(Linear(16, 4096), draw(3, 4096, seed=2), **how)
    assert emitted.xml.read_text().count('type="MatMul"') == (2 if forms else 1)


class SwiGLU(torch.nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.eval()
        self.gate, self.up = Linear(inner, width, bias=False), Linear(inner, width, bias=False)
        with torch.no_grad():
            self.up.inner.weight.copy_(draw(inner, width, seed=5, scale=width**-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", None), ("w8a16", 0.05)])
@pytest.mark.parametrize("arguments", [False, True])
@pytest.mark.parametrize("inner", [64, 8192])
def test_gate_and_up(inner: int, arguments: bool, precision: str, tolerance: float | None) -> None:
    """One contraction where they are wide and their weights are constants."""
    how = dict(forms=FUSE_PAIR, arguments=arguments, precision=precision, tolerance=tolerance)
    emitted = check(SwiGLU(inner, 32), draw(1, 5, 32, seed=2), **how)
    one = inner == 8192 and not arguments and precision == "fp16"  # joined int8 weights would be expanded
    assert emitted.xml.read_text().count('type="MatMul"') == (1 if one else 2)


@pytest.mark.parametrize(
    ("a", "b"),
    [((4, 5), (5, 6)), ((2, 4, 5), (2, 5, 6)), ((2, 3, 4, 5), (1, 3, 5, 6)), ((1, 4, 5), (3, 5, 6)), ((5,), (5, 6))],
)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check(torch.matmul, draw(*a), draw(*b, seed=1))


def test_matmul_of_a_transposed_operand() -> None:
    emitted = check(lambda a, b: a @ b.transpose(-1, -2), draw(2, 3, 4, 5), draw(2, 3, 6, 5, seed=1))
    assert 'type="Transpose"' not in emitted.xml.read_text()
    check(lambda a, b: a @ b.permute(2, 1, 0), draw(3, 4, 5), draw(6, 5, 3, seed=1))


@pytest.mark.parametrize("arguments", [False, True])
def test_matmul_with_a_constant(arguments: bool) -> None:
    constant = torch.nn.Parameter(draw(2, 5, 6, seed=1))

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = constant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    check(Product(), draw(2, 4, 5), arguments=arguments)


CONVS = [
    dict(kernel_size=3),
    dict(kernel_size=3, padding=1, stride=2),
    dict(kernel_size=3, padding=2, dilation=2),
    dict(kernel_size=3, padding=2, groups=4),
    dict(kernel_size=3, padding=2, groups=8),
    dict(kernel_size=1, bias=False),
]


@pytest.mark.parametrize("arguments", [False, True])
@pytest.mark.parametrize("settings", CONVS)
@pytest.mark.parametrize("dims", [1, 2])
def test_conv(dims: int, settings: dict, arguments: bool) -> None:
    torch.manual_seed(0)
    model = (torch.nn.Conv1d if dims == 1 else torch.nn.Conv2d)(8, 16, **settings)
    check(model, draw(2, 8, *(9, 7)[:dims]), arguments=arguments)


# --- attention -------------------------------------------------------------------------------------------------------

B, H, S, T, D = 2, 4, 5, 7, 8


def qkv(heads: int = H, t: int = T, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    return draw(B, H, S, D, scale=scale), draw(B, heads, t, D, seed=1, scale=scale), draw(B, heads, t, D, seed=2)


@pytest.mark.parametrize("forms", ATTENTION_FORMS)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool, scale: float | None, forms: int) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    check(attend, *qkv(), forms=forms)


@pytest.mark.parametrize("forms", ATTENTION_FORMS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries(causal: bool, heads: int, forms: int) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    check(attend, *qkv(heads), forms=forms)


MASKS = [(S, T), (1, T), (1, 1, S, T), (B, 1, S, T), (B, H, S, T), (1, H, 1, T), (B, 1, 1, T), (S, 1)]


@pytest.mark.parametrize("forms", [SDPA, STACKED | MASK_ARGUMENT])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("shape", MASKS)
def test_masks(shape: tuple[int, ...], boolean: bool, known: bool, forms: int) -> None:
    """Rows that see nothing are among them: zeros."""
    mask = draw(*shape, seed=3)
    if boolean:
        mask = mask > 0
        mask[..., 0, :] = False
    else:
        mask[..., 0, :] = -torch.inf
    if shape[-1] == 1:
        mask[..., -1, :] = True if boolean else 0.5

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor = mask) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True)

    check(attend, *qkv(2), *([] if known else [mask]), forms=forms)


@pytest.mark.parametrize("known", [False, True])
def test_mask_of_the_least_number(known: bool) -> None:
    """A whole row of finfo.min is even weights, not zeros and not NaN. In f16 it is a row of some weights (the device
    rounds them to even ones, openvino on the CPU does not), for finfo.min would be -inf and the row NaN."""
    mask = torch.zeros(S, T)
    mask[0] = torch.finfo(torch.float32).min
    mask[2, 3:] = torch.finfo(torch.float32).min

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor = mask) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m)

    check(attend, *qkv(), *([] if known else [mask]))
    emitted = emit(attend, (*qkv(), *([] if known else [mask])), f32=False)
    got = emitted.run((*qkv(), mask.clamp(min=-65504)), "f16")[0]
    assert got.isfinite().all()
    torch.testing.assert_close(got[:, :, 1:].float(), attend(*qkv())[:, :, 1:], atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("known", [False, True])
def test_softmax_attention_that_sees_nothing_is_nan(known: bool) -> None:
    """Written by hand, without SDPA's promise of zeros."""
    mask = torch.ones(S, T, dtype=torch.bool)
    mask[1] = False

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor = mask) -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2)) * 0.25
        return torch.softmax(scores.masked_fill(~m, -torch.inf), -1) @ v

    check(attend, *qkv(), *([] if known else [mask]))


@pytest.mark.parametrize("forms", [0, SDPA])
def test_attention_in_f16_keeps_scores_in_range(forms: int) -> None:
    """q.k is up to 2e5 before it is scaled."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1e-4)

    q, k, v = qkv(t=S)
    check(attend, q * 100, k * 100, v, f32=False, tolerance=2e-2, forms=forms)


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forms", [0, MVN])
@pytest.mark.parametrize(("w", "b"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("shape", [(16,), (3, 16)])
def test_layer_norm(shape: tuple[int, ...], w: bool, b: bool, forms: int) -> None:
    weight = draw(*shape, seed=1) if w else None
    bias = draw(*shape, seed=2) if b else None
    check(lambda x: F.layer_norm(x, shape, weight, bias, eps=1e-3), draw(4, 3, 16) + 2, forms=forms)


@pytest.mark.parametrize("weight", [None, draw(16, seed=1)])
def test_rms_norm(weight: torch.Tensor | None) -> None:
    check(lambda x: F.rms_norm(x, (16,), weight, eps=1e-3), draw(4, 3, 16))


def test_rms_norm_keeps_its_sum_in_range() -> None:
    """The mean of squares is 1e6: beyond f16, as are the activations of real models."""
    check(lambda x: F.rms_norm(x, (16,), None, eps=1e-6), draw(4, 3, 16, scale=1e3), f32=False, tolerance=5e-3)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_norm_with_residual(norm: object) -> None:
    """The sum is a second result."""
    weight = draw(16, seed=1)

    def residual(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + y
        return total, norm(total, (16,), weight, eps=1e-5)  # type: ignore[operator]

    check(residual, draw(4, 3, 16), draw(4, 3, 16, seed=2))


@pytest.mark.parametrize("forms", [0, MVN])
@pytest.mark.parametrize("shape", [(2, 8), (2, 8, 5), (2, 8, 4, 3)])
@pytest.mark.parametrize("affine", [False, True])
def test_group_norm(affine: bool, shape: tuple[int, ...], forms: int) -> None:
    weight, bias = (draw(8, seed=1), draw(8, seed=2)) if affine else (None, None)
    check(lambda x: F.group_norm(x, 4, weight, bias, eps=1e-3), draw(*shape) + 1, forms=forms)


# --- rotary embedding, softmax, gelu ---------------------------------------------------------------------------------


def turned(x: torch.Tensor, pairs: bool) -> torch.Tensor:
    if pairs:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("rank", "forms"), [(2, 0), (3, 0), (4, 0), (4, SIGNED_SIN)])
def test_rope(rank: int, forms: int, pairs: bool, known: bool) -> None:
    cos, sin = draw(S, D, seed=1), draw(S, D, seed=2)

    def rope(x: torch.Tensor, c: torch.Tensor = cos, s: torch.Tensor = sin) -> torch.Tensor:
        return x * c + turned(x, pairs) * s

    check(rope, draw(B, H, S, D)[(0,) * (4 - rank)], *([] if known else [cos, sin]), forms=forms)


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax(function: object, dim: int) -> None:
    x = draw(3, 4, 5)
    x[0, 0, 1] = -torch.inf
    check(lambda v: function(v, dim=dim), x)  # type: ignore[operator]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    check(lambda x: F.gelu(x, approximate=approximate), draw(3, 40, scale=4))


def test_a_block_in_f16() -> None:
    """All of it once more in the arithmetic of the device, borders included."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True).eval()
    check(layer, draw(1, 6, 32), f32=False, tolerance=1e-2)
    check(layer, draw(1, 6, 32), f32=False, border=True, tolerance=1e-2, precision="w8a16")
    assert emit(layer, (draw(1, 6, 32),), arguments=True).ports
