"""Operators inside `torch.autocast("cpu")` regions: exported graphs keep them without the casts that autocast makes."""

from __future__ import annotations

from typing import Any

import torch

from ..table import Value
from .emitter import Emitter
from .registry import Decline

# aten/src/ATen/autocast_mode.h: AT_FORALL_LOWER_PRECISION_FP_CPU and AT_FORALL_FP32_CPU
_LOWER = frozenset(
    "conv1d conv2d conv3d bmm mm linalg_vecdot baddbmm addmm addbmm linear _convolution matmul conv_tbc "
    "mkldnn_rnn_layer conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention "
    "_native_multi_head_attention ".split()
)


def autocast_arguments(
    b: Emitter, target: Any, region: tuple[str, torch.dtype], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Arguments with the casts that autocast would insert; Decline where torch has to decide."""
    name = target._schema.name.partition("::")[2]
    if name in _LOWER:
        return _cast(b, args, region[1]), _cast(b, kwargs, region[1])
    if name in _FULL_PRECISION:
        raise Decline("autocast decides the dtype")
    return args, kwargs


def _cast(b: Emitter, value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Value):
        eligible = value.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return b.cast(value, dtype) if eligible else value
    if isinstance(value, (list, tuple)):
        return [_cast(b, v, dtype) for v in value]
    if isinstance(value, dict):
        return {k: _cast(b, v, dtype) for k, v in value.items()}
    return value


_FULL_PRECISION = frozenset(
    "avg_pool3d binary_cross_entropy grid_sampler polar prod quantile nanquantile stft cdist trace "
    "view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d "
    "max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss "
    "margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss kl_div "
    "multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn "
    "fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond "
    "linalg_matrix_rank linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv "
    "linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf "
    "_lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d "
    "multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh "
    "linalg_lstsq linalg_inv_ex nuclear_norm pixel_unshuffle ".split()
)
