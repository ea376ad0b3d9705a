"""Which ops have rules, and what every rule keeps to."""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rooftrace.costmodels.ops.opview import all_rules, builtin, find_rule
from rooftrace.errors import RequestError
from tests.costmodels.rules_support import index, meta, price, views
from tests.releases import TORCH

pytestmark = pytest.mark.quick

OURS = [r for r in all_rules() if r.source == "rooftrace"]

# What HF Llama, GPT-2, BERT, T5, DeepSeek-V3, Mixtral, Qwen3-MoE, Mamba, ViT, Whisper, gpt-oss and
# Gemma-2, a residual network, a U-Net, recurrent cells and nn.Transformer ran in training, with
# twelve optimizers.
NAMES = """
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _cdist_backward _cdist_forward _conj _ctc_loss
_ctc_loss_backward _embedding_bag _embedding_bag_backward _fft_c2c _fft_c2r _fft_r2c _foreach_abs
_foreach_add _foreach_add_ _foreach_addcdiv_ _foreach_addcmul _foreach_addcmul_ _foreach_copy_
_foreach_div_ _foreach_lerp_ _foreach_maximum_ _foreach_mul _foreach_mul_ _foreach_norm
_foreach_reciprocal_ _foreach_sign_ _foreach_sqrt _foreach_sqrt_ _foreach_sub _foreach_zero_
_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_rms_norm _fused_rms_norm_backward _fused_sgd_
_grouped_mm _int_mm _linalg_det _linalg_svd _local_scalar_dense _log_softmax
_log_softmax_backward_data _native_batch_norm_legit _native_batch_norm_legit_no_training
_pdist_forward _prelu_kernel _prelu_kernel_backward _safe_softmax
_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward _scaled_grouped_mm
_scaled_mm _softmax _softmax_backward_data _thnn_fused_gru_cell _thnn_fused_lstm_cell
_thnn_fused_lstm_cell_backward_impl _to_copy _trilinear _unsafe_view _upsample_bilinear2d_aa
_weight_int4pack_mm abs acos adaptive_max_pool2d adaptive_max_pool2d_backward add add_ addbmm
addcdiv addcdiv_ addcmul addcmul_ addmm addmv addr affine_grid_generator alias all amax amin aminmax
any arange argmax argmin argsort as_strided asin atan atan2 avg_pool2d avg_pool2d_backward
avg_pool3d baddbmm bernoulli bernoulli_ binary_cross_entropy binary_cross_entropy_backward
binary_cross_entropy_with_logits bincount bitwise_and bitwise_not bitwise_or bmm bucketize cat ceil
celu channel_shuffle clamp clamp_ clamp_max clamp_min clone col2im constant_pad_nd convolution
convolution_backward copy_ cos cosh count_nonzero cummax cumprod cumsum detach diag_embed diagonal
diagonal_backward digamma div div_ dot elu elu_backward embedding embedding_dense_backward empty
empty_like eq erf erfc erfinv exp expand expm1 exponential_ eye fill_ flip floor floor_divide fmod
frac full full_like gather ge gelu gelu_backward glu glu_backward grid_sampler_2d
grid_sampler_2d_backward gt hardshrink hardsigmoid hardsigmoid_backward hardswish hardswish_backward
hardtanh hardtanh_backward histc huber_loss huber_loss_backward hypot i0 im2col index index_add
index_add_ index_copy index_fill index_put index_put_ index_select isfinite isinf isnan kthvalue le
leaky_relu leaky_relu_backward lerp lgamma lift_fresh linalg_cholesky_ex linalg_cross linalg_inv_ex
linalg_lu_solve linalg_qr linalg_solve_triangular linalg_vector_norm linspace log log10 log1p log2
log_sigmoid_backward log_sigmoid_forward logaddexp logcumsumexp logical_and logical_not logical_or
logsumexp lt masked_fill masked_fill_ masked_scatter masked_select max max_pool2d_with_indices
max_pool2d_with_indices_backward max_unpool2d maximum mean median min minimum mish mish_backward mm
mse_loss mse_loss_backward mul mul_ multinomial mv nan_to_num native_batch_norm
native_batch_norm_backward native_dropout native_dropout_backward native_group_norm
native_group_norm_backward native_layer_norm native_layer_norm_backward ne neg new_empty new_zeros
nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward nonzero norm normal_ ones
permute pixel_shuffle pixel_unshuffle polar pow prod rand randn randperm reciprocal reflection_pad2d
reflection_pad2d_backward relu relu_ remainder renorm repeat repeat_interleave replication_pad2d
roll round rrelu_with_noise rsqrt rsub scalar_tensor scatter scatter_ scatter_add scatter_reduce
select select_backward select_scatter sgn sigmoid sigmoid_backward sign silu silu_backward sin sinc
sinh slice slice_backward slice_scatter smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
softplus softplus_backward softshrink sort split split_with_sizes sqrt squeeze stack std std_mean
sub sub_ sum t take tan tanh tanh_backward threshold_backward topk trace transpose tril triu trunc
unbind unfold unfold_backward uniform_ unsqueeze upsample_bicubic2d upsample_bilinear2d
upsample_bilinear2d_backward upsample_linear1d upsample_nearest2d upsample_nearest2d_backward var
var_mean view view_as_complex view_as_real where xlogy zero_ zeros zeros_like
"""
COMMON = NAMES.split()


SINCE = {
    (2, 11): {
        "_foreach_powsum",
        "_fused_rms_norm_backward",
        "_scaled_grouped_mm_v2",
        "_scaled_mm_v2",
        "linalg__powsum",
    },
    (2, 12): {"_foreach_clone", "_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa_backward"},
}
"""The first release with an op, of those that the tests were run with."""
UNTIL = {(2, 15): {"cholesky"}}
"""The first release without an op."""


def test_every_rule_names_an_op_that_torch_has():
    aten = [r.name.removeprefix("aten.") for r in OURS if r.name.startswith("aten.")]
    newer = set().union(*(names for since, names in SINCE.items() if since > TORCH))
    gone = set().union(*(names for until, names in UNTIL.items() if until <= TORCH))
    assert {name for name in aten if not hasattr(torch.ops.aten, name)} == newer | gone
    assert len(aten) > 1000


@pytest.mark.parametrize("name", COMMON)
def test_a_common_op_has_a_rule(name):
    if any(name in names for since, names in SINCE.items() if since > TORCH):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    assert hasattr(torch.ops.aten, name)
    assert find_rule(f"aten.{name}.default") is not None


def test_ops_that_stay_whole_have_rules():
    for name in ("attention", "attention_backward", "rnn", "rnn_backward"):
        assert find_rule(f"rooftrace.{name}.default") is not None


def test_foreach_ops_have_rules():
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name.removeprefix("aten::") for s in schemas if s.name.startswith("aten::_foreach_")}
    without = {n for n in names if find_rule(f"aten.{n}.default") is None}
    assert without == names & {"_foreach_mm"}  # since 2.13


def test_a_second_rule_for_an_op_names_both():
    with pytest.raises(RequestError, match=r"matmul\.mm.*second"):
        builtin("aten.mm")(lambda op: None)


def test_rules_do_not_import_torch(root: Path):
    for path in (root / "rooftrace/costmodels/rules").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            )
            assert not any(name.split(".")[0] in ("torch", "numpy") for name in names), path.name


def test_each_fusion_class_is_what_a_compiler_would_do():
    classes = {
        name: find_rule(f"aten.{name}.default").fusion
        for name in (
            "mm",
            "convolution",
            "sort",
            "nonzero",
            "index_put_",
            "max_pool2d_with_indices_backward",
            "add",
            "_to_copy",
            "cat",
            "where",
            "constant_pad_nd",
            "native_dropout",
            "roll",
            "_softmax",
            "native_layer_norm",
            "sum",
            "argmax",
            "embedding",
            "index",
            "gather",
            "view",
            "empty",
        )
    }
    assert {n for n, c in classes.items() if c == "opaque"} == {
        "mm",
        "convolution",
        "sort",
        "nonzero",
        "index_put_",
        "max_pool2d_with_indices_backward",
    }
    assert {n for n, c in classes.items() if c == "reduction"} == {
        "_softmax",
        "native_layer_norm",
        "sum",
        "argmax",
    }
    assert {n for n, c in classes.items() if c == "gather"} == {"embedding", "index", "gather"}
    assert {n for n, c in classes.items() if c == "free"} == {"view", "empty"}


def _network(x, table, ids):
    """A bit of everything, forward and backward."""
    y = F.embedding(ids, table) + x
    y = F.layer_norm(y, y.shape[-1:])
    y = F.gelu(y @ torch.cat([y, y], 1).transpose(1, 2)).softmax(-1)
    y = F.interpolate(
        F.max_pool2d(F.conv2d(y[:, None], meta(3, 1, 3, 3, grad=True)), 2), scale_factor=2
    )
    y = F.pad(y, (1, 1)).cumsum(-1).sort(-1)[0].topk(2)[0].var((1, 2))
    F.cross_entropy(y, index(y.shape[0])).backward()


def test_costs_are_whole_and_not_negative():
    table = meta(100, 8, grad=True)
    seen = views(lambda: _network(meta(2, 16, 8), table, index(2, 16)))
    assert len(seen) > 60
    for op in seen:
        found = price(op)
        assert all(isinstance(n, int) and n > 0 for n in found.work.values()), op.target
        assert all(isinstance(n, int) and n > 0 for n in found.traffic.values()), op.target
        locals_ = {t.storage for t in (*op.inputs, *op.outputs)}
        assert all(access.storage in locals_ for access in found.traffic), op.target


def test_nothing_but_compulsory_bytes_moves():
    """Each op reads at most its inputs, writes at most its outputs, but for named exceptions."""
    several = {
        "slice_backward",
        "select_backward",
        "embedding_dense_backward",
        "nll_loss_backward",
        "scatter",
        "convolution_backward",  # see test_rules_passes
    }
    table = meta(100, 8, grad=True)
    for op in views(lambda: _network(meta(2, 16, 8), table, index(2, 16))):
        if op.target.split(".")[1] in several:
            continue
        read = sum(t.nbytes for t in op.inputs)
        written = sum(t.nbytes for t in op.outputs)
        for access, size in price(op).traffic.items():
            assert size <= (written if access.write else read), op.target


INTEGER = {
    "add": lambda: index(4, 4) + index(4, 4),
    "mul": lambda: index(4, 4) * 3,
    "sum": lambda: index(4, 4).sum(),
    "cumsum": lambda: index(4, 4).cumsum(0),
    "compare": lambda: index(4, 4) >= index(4),
    "max": lambda: index(4, 4).max(1),
    "where": lambda: torch.where(index(4) > 0, index(4), 0),
    "sort": lambda: index(4, 4).sort(),
    "one_hot": lambda: torch.zeros(4, 5, device="meta", dtype=torch.int64).scatter_(
        1, index(4, 1), 1
    ),
    "and": lambda: (index(4) > 0) & (index(4) < 3),
    "arange": lambda: torch.arange(9, device="meta"),
    "gather": lambda: index(4, 4).gather(1, index(4, 2)),
    "index_add": lambda: index(4, 4).index_add(0, index(2), index(2, 4)),
    "pow": lambda: index(4) ** 2,
    "clamp": lambda: index(4).clamp(0, 3),
    "histc": lambda: index(4).histc(4, 0, 4),
    "floor": lambda: index(4) // 2,
    "roll": lambda: index(4).roll(1),
    "any": lambda: (index(4) > 0).any(),
}


@pytest.mark.parametrize("name", INTEGER)
def test_integer_work_is_bytes_only_but_for_products(name):
    for op in views(INTEGER[name]):
        found = price(op)
        assert not found.work, op.target
        assert found.traffic or find_rule(op.target).fusion == "free", op.target


def test_half_precision_vector_work_is_done_in_fp32_and_double_in_fp64():
    half, double = meta(4, dtype=torch.bfloat16), meta(4, dtype=torch.float64)
    assert [w.precision for w in price(views(lambda: half * half)[0]).work] == ["fp32"]
    assert [w.precision for w in price(views(lambda: double * double)[0]).work] == ["fp64"]
