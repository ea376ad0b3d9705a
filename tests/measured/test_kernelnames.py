"""Which kernel a name says, whatever sizes stand in it."""

import pytest

from rooftrace.diffs.runs.rundiff import family_of_kernel, is_communication, kernel_key

pytestmark = pytest.mark.quick

SAME = [
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_64x6_tn_align8>(X)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_tn_align2>(X)",
    ),
    (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute",
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize2x1x1_execute",
    ),
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_NNN", "nvjet_hsh_64x64_64x4_1x1_v_bz_NNN"),
    (
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_MT256x256x64_MI16x16x1_SN",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_MT128x64x32_MI32x32x1_SN",
    ),
    ("triton_poi_fused_add_gelu_0", "triton_poi_fused_add_gelu_17"),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
        "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
        "at::native::CUDAFunctor_add<c10::BFloat16> >(at::TensorIteratorBase&)>(int)",
    ),
]
OTHER = [
    (SAME[0][0], SAME[1][0]),
    ("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"),
    ("triton_poi_fused_add_0", "triton_poi_fused_mul_0"),
    (
        "void at::native::reduce_kernel<512, ReduceOp<float, at::native::MeanOps>>(X)",
        "void at::native::reduce_kernel<512, ReduceOp<float, at::native::MaxOps>>(X)",
    ),
]


@pytest.mark.parametrize(("one_name", "other"), SAME)
def test_sizes_and_chips_in_a_name_make_no_other_kernel(one_name: str, other: str) -> None:
    assert kernel_key(one_name) == kernel_key(other)


@pytest.mark.parametrize(("one_name", "other"), OTHER)
def test_other_kernels_stay_others(one_name: str, other: str) -> None:
    assert kernel_key(one_name) != kernel_key(other)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "communication"),
        ("void vllm::cross_device_reduce_1stage<nv_bfloat16, 2>(X)", "communication"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_NNN", "dense"),
        ("void at::native::vectorized_layer_norm_kernel<float, float>(X)", "norm"),
        ("void at::native::tanh_kernel_cuda(X)", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, tanh_kernel_cuda>(X)", "elementwise"),
        ("triton_tem_fused_addmm_3", "dense"),
        ("triton_tem_fused__unsafe_view_bmm_12", "dense"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_mm", "dense"),
        ("_fwd_kernel", "attention"),
        ("triton_poi_fused_convolution_relu_1", "elementwise"),
        ("triton_per_fused_native_layer_norm_2", "norm"),
        ("triton_red_fused_mm_sum_4", "other"),
    ],
)  # fmt: skip
def test_the_family_of_a_kernel_that_no_op_launched(name: str, family: str) -> None:
    assert family_of_kernel(name, "kernel") == family
    assert is_communication(name) == (family == "communication")
