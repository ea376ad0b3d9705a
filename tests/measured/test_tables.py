"""Nsight Compute's CSV and tables of step times: what they say, and what is wrong with them."""

from pathlib import Path

import pytest

from rooftrace.errors import ProfileError
from rooftrace.measured.profiles.tables import StepTime, read_counters, read_steps

pytestmark = pytest.mark.quick

RAW = """\
==PROF== Connected to process 4242 (python3.12)
==PROF== Profiling "gemm": 0%....50%....100% - 3 passes
"ID","Process ID","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","","","","","","","","Mbyte","Kbyte","usecond"
"0","4242","void gemm<128, 128>(float *)","1","7","(128, 1, 1)","(1024, 2, 1)","0","9.0",\
"1,050.5","4.25","310.4"
"1","4242","gelu","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0","0","0","2.1"
"""
DETAILS = """\
"ID","Process ID","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","gemm","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0","Speed Of Light","Duration","ms","1.5"
"0","1","gemm","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0","Command line",\
"dram__bytes_read.sum","Gbyte","2"
"0","1","gemm","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0","Command line",\
"dram__bytes_write.sum","byte","64"
"""


def written_to(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


# -- Nsight Compute ------------------------------------------------------------------------------


def test_the_raw_page(tmp_path: Path) -> None:
    gemm, gelu = read_counters(written_to(tmp_path, RAW))
    assert gemm.name == "void gemm<128, 128>(float *)"
    assert gemm.duration == pytest.approx(310.4e-6)
    assert gemm.read == 1_050_500_000 and gemm.written == 4250
    assert gemm.grid == (1024, 2, 1) and gemm.block == (128, 1, 1)
    assert gemm.bandwidth == pytest.approx((1_050_500_000 + 4250) / 310.4e-6)
    assert (gelu.index, gelu.bytes) == (1, 0)  # served from the caches


def test_the_details_page(tmp_path: Path) -> None:
    (kernel,) = read_counters(written_to(tmp_path, DETAILS))
    assert kernel.duration == pytest.approx(1.5e-3)
    assert kernel.read == 2_000_000_000 and kernel.written == 64


@pytest.mark.parametrize(
    ("unit", "seconds"), [("nsecond", 310.4e-9), ("ns", 310.4e-9), ("ms", 0.3104), ("s", 310.4)]
)
def test_units_of_time(tmp_path: Path, unit: str, seconds: float) -> None:
    gemm, _ = read_counters(written_to(tmp_path, RAW.replace("usecond", unit)))
    assert gemm.duration == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 'no line has a column "Kernel Name"'),
        (RAW.replace("dram__bytes_read.sum", "other"), "no metric dram__bytes_read.sum; make it"),
        (
            DETAILS.replace("dram__bytes", "lts__bytes"),
            "no metric dram__bytes_read.sum, dram__bytes_write.sum; make it with `ncu",
        ),
        (RAW.replace("usecond", "cycle"), r"line 5, metric gpu__time_duration.sum: unit 'cycle'"),
        (RAW.replace('"2.1"', '"n/a"'), "line 6, column 'gpu__time_duration.sum': 'n/a'"),
        (RAW.replace('"2.1"', '"-2.1"'), "line 6, column 'gpu__time_duration.sum': '-2.1'"),
        (RAW.replace(',"2.1"', ""), "line 6: 11 cells, the header has 12"),
        (
            RAW.replace('"","","","","","","","","","Mbyte","Kbyte","usecond"\n', ""),
            "line of units",
        ),
        ("\n".join(RAW.splitlines()[:4]), "no kernel after the header"),
    ],
)
def test_what_is_wrong_with_counters(tmp_path: Path, text: str, words: str) -> None:
    path = written_to(tmp_path, text)
    with pytest.raises(ProfileError, match=words) as caught:
        read_counters(path)
    assert str(path) in str(caught.value)


def numbers(read: str, written: str, time: str, units: str = '"Mbyte","Kbyte","us"') -> str:
    """A raw page with one kernel of these numbers."""
    head, *_ = RAW.splitlines()[2:3]
    return (
        f'{head}\n"","","","","","","","","",{units}\n'
        f'"0","1","gemm","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0",'
        f'"{read}","{written}","{time}"\n'
    )


@pytest.mark.parametrize(
    ("read", "written", "time", "values"),
    [
        ("1,50", "5,25", "3,14", (1_500_000, 5250, 3.14e-6)),
        ("1.234,56", "0,5", "1.024", (1_234_560_000, 500, 1024e-6)),
        ("1 234,56", "0,5", "2", (1_234_560_000, 500, 2e-6)),
        ("1,234.56", "0.5", "1,024", (1_234_560_000, 500, 1024e-6)),
        ("1'234.56", "0.5", "2", (1_234_560_000, 500, 2e-6)),
        ("12", "5", "3", (12_000_000, 5000, 3e-6)),
    ],
)
def test_numbers_are_of_the_locale_that_the_file_as_a_whole_tells(
    tmp_path: Path, read: str, written: str, time: str, values: tuple[int, int, float]
) -> None:
    (kernel,) = read_counters(written_to(tmp_path, numbers(read, written, time)))
    assert (kernel.read, kernel.written) == values[:2]
    assert kernel.duration == pytest.approx(values[2])


def test_a_sum_of_bytes_has_no_decimals_so_that_its_comma_is_of_thousands(tmp_path: Path) -> None:
    text = numbers("1,234", "512", "2,336", '"byte","byte","nsecond"')
    (kernel,) = read_counters(written_to(tmp_path, text))
    assert (kernel.read, kernel.written) == (1234, 512)
    assert kernel.duration == pytest.approx(2336e-9)


@pytest.mark.parametrize(
    ("read", "time", "words"),
    [
        ("1,234", "5", "'1,234': no other number of the file tells"),
        ("1.234", "2,345", "'1.234': no other number of the file tells"),
        ("1,50", "3.14", "'3.14', and '1,50' in line 3: a comma before decimals beside a dot"),
    ],
)
def test_numbers_that_may_be_of_either_locale_are_refused(
    tmp_path: Path, read: str, time: str, words: str
) -> None:
    with pytest.raises(ProfileError, match=words):
        read_counters(written_to(tmp_path, numbers(read, "12", time)))


def test_a_step_of_a_decimal_comma_is_refused_and_one_of_thousands_read(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"'1,50': .* with a dot before its decimals"):
        read_steps(written_to(tmp_path, 'model,ms\nnet,"1,50"\n'))
    (step,) = read_steps(written_to(tmp_path, 'model,ms\nnet,"1,234.5"\n'))
    assert step.seconds == pytest.approx(1.2345)


# -- step times ----------------------------------------------------------------------------------


def test_a_table_of_language_models(tmp_path: Path) -> None:
    text = (
        "Model,Batch Size,seq,KV,phase,dtype,mode,Step-ms\nllama,8,1,4096,decode,bf16,eager,12.5\n"
    )
    assert read_steps(written_to(tmp_path, text)) == (
        StepTime(
            target="llama",
            seconds=0.0125,
            batch=8,
            seq=1,
            kv=4096,
            image_size=None,
            phase="decode",
            dtype="bf16",
            execution="eager",
            chip=None,
            line=2,
        ),
    )


def test_a_table_as_timm_writes_it(tmp_path: Path) -> None:
    text = (
        "model,infer_img_size,infer_samples_per_sec,infer_step_time,infer_batch_size,param_count\n"
        "resnet50,224,4000.0,64.0,256,25.56\n"
    )
    (step,) = read_steps(written_to(tmp_path, text))
    assert step.seconds == pytest.approx(0.064) and step.batch == 256 and step.image_size == 224
    assert step.phase == "forward"
    assert step.extra == {"infer_samples_per_sec": "4000.0", "param_count": "25.56"}


@pytest.mark.parametrize(
    ("column", "seconds"),
    [("ms", 0.005), ("us", 5e-6), ("seconds", 5.0), ("latency_ms", 0.005), ("items_per_s", 8 / 5)],
)
def test_units_of_a_step(tmp_path: Path, column: str, seconds: float) -> None:
    (step,) = read_steps(written_to(tmp_path, f"target,batch,{column}\nmodel.py:build,8,5\n"))
    assert step.seconds == pytest.approx(seconds)


def test_runs_that_failed_can_be_left_out(tmp_path: Path) -> None:
    path = written_to(tmp_path, "model,ms\na,1\nb,\nc,3\n")
    assert [step.target for step in read_steps(path, skip_empty=True)] == ["a", "c"]
    with pytest.raises(ProfileError, match=r"line 3, column 'ms': the cell is empty.*skip_empty"):
        read_steps(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("model,ms\n", "no steps after the header in line 1"),
        ("batch,ms\n8,1\n", "no column for what ran"),
        ("model,batch\na,8\n", "no column for the time"),
        ("model,ms,ms\na,1,2\n", "column 'ms' is there 2 times"),
        ("model,ms,seconds\na,1,2\n", "'ms' and 'seconds' both say the time"),
        ("model,batch,batch_size,ms\na,1,1,2\n", "'batch' and 'batch_size' both say batch"),
        ("model,train_ms,infer_ms\na,1,2\n", "say the same"),
        ("model,samples_per_sec\na,10\n", "only with a column batch"),
        ("model,batch,samples_per_sec\na,,10\n", "only with a batch"),
        ("model,ms\na,nan\n", "line 2, column 'ms': 'nan': expected a number above 0"),
        ("model,ms\na,1\nb,-3\n", "line 3, column 'ms': '-3'"),
        ("model,ms\na,0\n", "line 2, column 'ms': '0'"),
        ("model,ms\na,inf\n", "line 2, column 'ms': 'inf'"),
        ("model,ms\na,fast\n", "line 2, column 'ms': 'fast'"),
        ("model,ms\na,1,2\n", "line 2: 3 cells, the header has 2"),
        ("model,ms\n,1\n", "line 2, column 'model': the cell is empty"),
        ("model,batch,ms\na,1.5,2\n", "line 2, column 'batch': '1.5': expected a whole number"),
        ('model,ms\n"a,1\n', "not CSV"),
    ],
)
def test_what_is_wrong_with_a_table(tmp_path: Path, text: str, words: str) -> None:
    path = written_to(tmp_path, text)
    with pytest.raises(ProfileError, match=words) as caught:
        read_steps(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"model,ms\n\xff\xfe,1\n")
    with pytest.raises(ProfileError, match="UTF-8"):
        read_steps(path)
