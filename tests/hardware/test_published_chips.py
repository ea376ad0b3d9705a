"""Figures of chips as documents other than their data sheets print them, and what all chips share.

Whoever adds a chip adds nothing here; whoever changes a figure has to convince two documents.
"""

import pytest

from rooftrace.hardware import available_chips, load_chip
from rooftrace.hardware.chipfile.reading import UnknownChipError

pytestmark = pytest.mark.quick

# chip: dense TFLOP/s by precision; GB/s; GiB (less what a driver keeps: up to 7 %); MiB of L2;
# SMs or compute units.  None: the document does not say.
PUBLISHED = {
    # Tables of accelerators in https://github.com/stas00/ml-engineering and
    # https://glennklockwood.com/garden/processors, 2024 and 2025; without sparsity.
    "gb200": ({"tf32": 1250, "bf16": 2500, "fp8": 5000, "fp4": 10000}, 8000, 186, None, 152),
    "b300-sxm": ({"tf32": 1125, "bf16": 2250, "fp8": 4500, "fp6": 4500}, None, 270, None, 148),
    "h100-pcie": ({"tf32": 378, "bf16": 756, "fp8": 1513, "int8": 1513}, 2000, 80, 50, 114),
    "h100-sxm": ({"tf32": 494.5, "bf16": 989, "fp8": 1979, "int8": 1979}, 3350, 80, 50, 132),
    "a100-sxm-80": ({"tf32": 156, "bf16": 312, "int8": 624}, 2039, 80, 40, 108),
    "l40s": ({"tf32": 183, "bf16": 362, "fp8": 733, "int8": 733}, 864, 48, 96, 142),
    # Verda, GB300 NVL72: GPU Architecture and Performance, 2025; NVIDIA lists SMs in no table, so
    # they are those of kernels' authors in https://github.com/flashinfer-ai/flashinfer.
    "gb300": ({"bf16": 2500, "fp8": 5000, "fp4": 15000, "int8": 165}, 8000, 279, 129, 152),
    # Peak FLOP/s for utilisation in https://github.com/volcengine/verl and its like.
    "h20": ({"bf16": 148, "fp8": 296}, 4000, 96, 60, 78),
    "h800-sxm": ({"bf16": 989}, 3350, 80, 50, 132),
    "a800-sxm-80": ({"bf16": 312}, 2039, 80, 40, 108),
    "h100-nvl": ({"bf16": 835}, 3900, 94, None, 132),
    "a10g": ({"bf16": 70, "int8": 140}, 600, 24, 6, 80),
    "a10": ({"bf16": 125, "int8": 250}, 600, 24, 6, 72),
    "a30": ({"bf16": 165, "tf32": 82, "int8": 330}, 933, 24, 24, 56),
    # Wikipedia, NVIDIA Tesla, table of specifications.
    "t4": ({"fp16": 65, "int8": 130}, 320, 16, 4, 40),
    "v100-sxm2-16": ({"fp16": 125}, 900, 16, 6, 80),
    "v100-sxm2-32": ({"fp16": 125}, 900, 32, 6, 80),
    "v100-pcie-16": ({"fp16": 112}, 900, 16, 6, 80),
    # torch.cuda.get_device_properties of a GH200, and NVIDIA's product page.
    "gh200-144": ({"bf16": 990, "fp8": 1979}, 4900, 144, 60, 132),
    "gh200-96": ({"bf16": 990, "fp8": 1979}, 4000, 96, None, 132),
    # AMD GPU specifications, https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html, 2025;
    # rates as https://www.tomshardware.com (June 2025) and ISSCC 2026 give them.
    "mi325x": ({"bf16": 1307, "fp8": 2615}, 6000, 256, 32, 304),
    "mi350x": ({"bf16": 2300, "fp8": 4600, "fp4": 9200}, 8000, 288, 32, 256),
    "mi355x": ({"bf16": 2517, "fp8": 5033, "fp4": 10066}, 8000, 288, 32, 256),
    # "AI TOPS" of https://www.nvidia.com/en-us/geforce/graphics-cards/compare: sparse fp4 of RTX
    # 50, sparse int8 of RTX 40 and 30; halved here.
    "rtx-5080": ({"fp4": 900.5}, 960, 16, 64, 84),
    "rtx-5070-ti": ({"fp4": 703}, 896, 16, 48, 70),
    "rtx-5070": ({"fp4": 494}, 672, 12, 48, 48),
    "rtx-4080": ({"int8": 390}, 717, 16, 64, 76),
    "rtx-4080-super": ({"int8": 418}, 736, 16, 64, 80),
    "rtx-4070-ti-super": ({"int8": 353}, 672, 16, 48, 66),
    "rtx-3080": ({"int8": 238}, 760, 10, 5, 68),
    "rtx-3090-ti": ({"int8": 320}, 1008, 24, 6, 84),
    "rtx-6000-ada": ({"fp8": 728.5}, 960, 48, 96, 142),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_chip_has_the_figures_that_others_print(name):
    rates, bandwidth, memory, cache, units = PUBLISHED[name]
    chip = load_chip(name)
    for precision, tera in rates.items():
        # Documents round to three digits.
        assert chip.peak("matrix", precision) == pytest.approx(tera * 1e12, rel=0.011), precision
    if bandwidth is not None:
        assert chip.memory_bandwidth.value == pytest.approx(bandwidth * 1e9, rel=0.02)
    assert 0.93 * memory <= chip.memory_capacity.value / 2**30 <= 1.01 * memory
    if cache is not None:
        assert chip.l2_capacity.value == cache * 2**20
    if units is not None:
        assert chip.sm_count.value == units


GPUS = [name for name in available_chips() if load_chip(name).kind == "gpu"]


@pytest.mark.parametrize("name", GPUS)
def test_fp8_is_twice_bf16_and_half_precision_is_there(name):
    chip = load_chip(name)
    assert chip.has_peak("matrix", "fp16") and chip.has_peak("vector", "fp32")
    if chip.has_peak("matrix", "fp8"):
        both = chip.peak("matrix", "fp8") / chip.peak("matrix", "bf16")
        assert both == pytest.approx(2, rel=0.015)
    if chip.has_peak("matrix", "bf16"):
        assert chip.peak("matrix", "bf16") == chip.peak("matrix", "fp16")


def test_chips_have_the_precisions_of_their_generation_and_no_others():
    """As NVIDIA's tables of tensor cores by compute capability have them."""
    from rooftrace.scripts.fake_cuda import Device

    known = {
        (7, 0): {"fp16"},
        (7, 5): {"fp16", "int8", "int4"},
        (8, 0): {"fp64", "tf32", "bf16", "fp16", "int8", "int4"},
        (8, 6): {"tf32", "bf16", "fp16", "int8", "int4"},
        (8, 9): {"tf32", "bf16", "fp16", "fp8", "int8", "int4"},
        (9, 0): {"fp64", "tf32", "bf16", "fp16", "fp8", "int8"},
        (10, 0): {"fp64", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8"},
        (10, 3): {"fp64", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8"},
        (12, 0): {"tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8"},
    }
    for name in GPUS:
        chip = load_chip(name)
        if chip.vendor == "NVIDIA":
            has = {peak.precision for peak in chip.peaks if peak.engine == "matrix"}
            assert has <= known[Device.of(chip).capability], name


# What torch.cuda.get_device_name() says, on machines of these kinds.
DEVICES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA H20": "h20",
    "NVIDIA H800": "h800-sxm",
    "NVIDIA A800-SXM4-80GB": "a800-sxm-80",
    "NVIDIA A800 80GB PCIe": "a800-pcie-80",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A30": "a30",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100-sxm2-16",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32",
    "Tesla V100-PCIE-16GB": "v100-pcie-16",
    "Tesla V100-PCIE-32GB": "v100-pcie-32",
    "NVIDIA GH200 480GB": "gh200-96",
    "NVIDIA GH200 144G HBM3e": "gh200-144",
    "NVIDIA B200": "b200-sxm",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300-sxm",
    "NVIDIA GB300": "gb300",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
    "AMD Instinct MI350X": "mi350x",
    "AMD Instinct MI355X": "mi355x",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA GeForce RTX 5080": "rtx-5080",
    "NVIDIA GeForce RTX 5070 Ti": "rtx-5070-ti",
    "NVIDIA GeForce RTX 5070": "rtx-5070",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 4080": "rtx-4080",
    "NVIDIA GeForce RTX 4080 SUPER": "rtx-4080-super",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx-4070-ti-super",
    "NVIDIA GeForce RTX 3090 Ti": "rtx-3090-ti",
    "NVIDIA GeForce RTX 3080": "rtx-3080",
}
SPOKEN = {
    "h100": "h100-sxm",
    "H100 PCIe": "h100-pcie",
    "h100 sxm": "h100-sxm",
    "h100_nvl": "h100-nvl",
    "nvidia h100 80gb hbm3": "h100-sxm",
    "a100": "a100-sxm-80",
    "v100": "v100-sxm2-16",
    "gh200": "gh200-96",
    "b300": "b300-sxm",
    "h800": "h800-sxm",
    "rtx5090": "rtx-5090",
    "5090": "rtx-5090",
    "RTX 4070 Ti Super": "rtx-4070-ti-super",
    "GeForce RTX 4080": "rtx-4080",
    "mi300": "mi300x",
    "MI355X": "mi355x",
    "rtx 6000 ada": "rtx-6000-ada",
    "NVIDIA H100": "h100-sxm",
    "nvidia rtx 4090": "rtx-4090",
}


@pytest.mark.parametrize(("device", "name"), {**DEVICES, **SPOKEN}.items())
def test_a_chip_is_found_by_what_drivers_and_people_call_it(device, name):
    assert load_chip(device).name == name


@pytest.mark.parametrize(
    ("text", "relatives"),
    [
        ("h100-nvl2", ["h100-nvl"]),
        ("h100-cnx", ["h100-sxm", "h100-pcie", "h100-nvl"]),
        ("NVIDIA A100-SXM-64GB", ["a100-sxm-80", "a100-sxm-40"]),
        ("rtx-4090-ti", ["rtx-4090"]),
        ("mi300a", ["mi300x"]),
        ("NVIDIA GeForce RTX 5090 D", ["rtx-5090"]),
        ("v100s-pcie-32gb", ["v100-pcie-32"]),
        ("h10", ["h100-sxm"]),
        ("h100-sxm5-80gb", ["h100-sxm"]),
        ("AMD Instinct MI300X VF", ["mi300x"]),
        ("quantum", []),
    ],
)
def test_an_unknown_chip_is_told_its_relatives_first(text, relatives):
    with pytest.raises(UnknownChipError) as error:
        load_chip(text)
    told = str(error.value)
    first, _, rest = told.partition("xpected a path ending in .toml or one of ")
    assert first.startswith(f'chip "{text}": did you mean \'' if relatives else f'chip "{text}": e')
    assert all(f"'{name}'" in first for name in relatives), told
    assert "l40s" in rest and "l40s" not in first


def test_of_equal_relatives_the_one_that_is_spelled_most_alike_is_first() -> None:
    with pytest.raises(UnknownChipError, match="did you mean 'h100-sxm'"):
        load_chip("h100sxm")
