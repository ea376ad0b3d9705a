"""The callbacks of training libraries: right figures in the logs, and the same training."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.hardware import load_chip
from rooftrace.measured.live import trainers
from tests.measured.live_support import Net, Ticks, matrix_flops

pytestmark = pytest.mark.usefixtures("no_accelerator_stays")

CHIP = "l4"
QUICK: dict[str, Any] = {"chip": CHIP, "warmup": 1, "profile": 0}
BATCH = 4


# -- transformers ----------------------------------------------------------------------------------


def language_model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=32, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config)


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Texts of ids; every batch of them has one of two lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = self.lengths[index // BATCH % len(self.lengths)]
        ids = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def in_order(trainer_class: Any) -> Any:
    """A Trainer that does not shuffle, so that a batch has texts of one length."""

    class InOrder(trainer_class):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder


def fine_tuned(
    folder: Path, callbacks: Sequence[Any], lengths: Sequence[int] = (8,), **how: Any
) -> Any:
    """A trainer that has trained for six steps."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    settings = {"max_steps": 6, "logging_steps": 2, "save_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        report_to=[],
        disable_tqdm=True,
        **{**settings, **how},
    )
    trainer = in_order(transformers.Trainer)(
        language_model(), arguments, train_dataset=Texts(lengths), callbacks=list(callbacks)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return trainer


def flops_of_texts(length: int) -> int:
    """FLOP of a forward and backward of one batch by torch's own counter."""
    ids = torch.randint(0, 50, (BATCH, length))
    with FlopCounterMode(display=False) as counter:
        language_model()(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pieces", "how"),
    [(1, {}), (3, {"bf16": True}), (1, {"gradient_checkpointing": True})],
    ids=["plain", "accumulated in bf16", "checkpointed"],
)
def test_a_trainer_that_is_watched_trains_the_same_and_counts_what_torch_counts(
    pieces: int, how: dict[str, Any], tmp_path: Path
) -> None:
    how = {**how, "gradient_accumulation_steps": pieces}
    callback = rt.tools.trainer_callback(**QUICK)
    beside = fine_tuned(tmp_path / "beside", [callback], **how)
    alone = fine_tuned(tmp_path / "alone", [], **how)
    assert losses(beside) == losses(alone)
    states = (t.model.state_dict().values() for t in (beside, alone))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    if "gradient_checkpointing" not in how:
        assert matrix_flops(callback.live) == pieces * flops_of_texts(8)
    else:
        assert callback.result.figures.hfu > callback.result.figures.mfu
    products = [
        op
        for graph, _ in callback.live.graphs
        for op in graph.ops
        if op.target == "aten.addmm.default"
    ]
    dtypes = {callback.live.graphs[0][0].values[op.outputs[0]].dtype for op in products}
    assert dtypes == {"bf16" if "bf16" in how else "fp32"}


@pytest.mark.slow
def test_the_logs_have_the_figures_since_the_last_log_before_any_logger_sees_them(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    seen: list[dict[str, float]] = []

    class Logger(transformers.TrainerCallback):  # type: ignore[misc]
        """As TensorBoard's, it stands before the callbacks of the user."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    # Each second reading of the clock ends a step.
    callback = rt.tools.trainer_callback(**QUICK, clock=Ticks(1.0, 0.5))
    trainer = fine_tuned(tmp_path, [Logger(), callback], lengths=(8, 12))
    logged = [logs for logs in seen if "loss" in logs]
    assert len(logged) == 3
    assert [logs["rooftrace/step_s"] for logs in logged] == [0.5] * 3
    # The first step warms up: the first log has the second step alone, of 12 ids a text.
    tokens = [12, (8 + 12) / 2, (8 + 12) / 2]
    assert [logs["rooftrace/tokens_per_s"] for logs in logged] == [BATCH * n / 0.5 for n in tokens]
    mean = (flops_of_texts(8) + flops_of_texts(12)) / 2
    peak = load_chip(CHIP).peak("vector", "fp32")
    assert logged[1]["rooftrace/mfu"] == pytest.approx(mean / 0.5 / peak)
    assert logged[1]["rooftrace/expected_step_s"] > 0
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rooftrace/mfu"] for entry in history] == [x["rooftrace/mfu"] for x in logged]
    assert not any(key.startswith("rooftrace/") for key in seen[-1])  # the summary of the training


@pytest.mark.slow
def test_evaluation_is_in_no_step(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    callback = rt.tools.trainer_callback(**QUICK, clock=Ticks(1.0, 0.5))
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=BATCH,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
    )
    trainer = in_order(transformers.Trainer)(
        language_model(),
        arguments,
        train_dataset=Texts((8,)),
        eval_dataset=Texts((8,)),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.result.figures.steps == 3
    assert callback.result.figures.samples_per_s == BATCH / 0.5
    assert matrix_flops(callback.live) == flops_of_texts(8)


@pytest.mark.slow
def test_a_trainer_that_compiles_is_counted_as_compiled(tmp_path: Path) -> None:
    callback = rt.tools.trainer_callback(**QUICK)
    trainer = fine_tuned(
        tmp_path, [callback], torch_compile=True, torch_compile_backend="eager", max_steps=3
    )
    assert callback.result.execution == "compiled"
    assert matrix_flops(callback.live) == flops_of_texts(8)
    assert len(losses(trainer)) == 1
    torch._dynamo.reset()


def test_only_the_first_process_watches(tmp_path: Path) -> None:
    class State:
        is_world_process_zero = False

    callback = rt.tools.trainer_callback(**QUICK)
    callback.on_train_begin(None, State(), None, model=language_model())
    callback.on_step_begin(None, State(), None)
    logs = {"loss": 1.0}
    callback.on_log(None, State(), None, logs=logs)
    assert logs == {"loss": 1.0} and callback.live is None
    with pytest.raises(RequestError, match="when training has begun"):
        _ = callback.result


# -- Lightning -------------------------------------------------------------------------------------


def lightning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("pytorch_lightning")


def module_class(manual: bool = False) -> Any:
    """A LightningModule whose loss is a function, with a buffer that counts."""
    pl = lightning()

    class Classifier(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.register_buffer("seen", torch.zeros(()))
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.seen += 1
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss)
            if not manual:
                return {"loss": loss, "count": torch.ones(())}
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Classifier


def fitted(
    folder: Path, callbacks: Sequence[Any], manual: bool = False, kind: Any = None, **how: Any
) -> Any:
    """A trainer of Lightning that has trained for eight batches, with validation between."""
    pl = lightning()
    from pytorch_lightning.loggers import CSVLogger

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(32, 16, generator=generator), torch.randint(0, 4, (32,), generator=generator)
    )
    loaders = [torch.utils.data.DataLoader(data, batch_size=8) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            default_root_dir=folder,
            logger=CSVLogger(folder),
            max_epochs=2,
            log_every_n_steps=2,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            num_sanity_val_steps=1,
            callbacks=list(callbacks),
            **how,
        )
        trainer.fit((kind or module_class(manual))(), *loaders)
    return trainer


def flops_of_a_batch() -> int:
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(Net()(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long)).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("manual", "how"),
    [
        (False, {}),
        (False, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        (True, {}),
    ],
    ids=["plain", "accumulated in bf16", "manual"],
)
def test_a_lightning_trainer_that_is_watched_trains_the_same_and_counts_what_torch_counts(
    manual: bool, how: dict[str, Any], tmp_path: Path
) -> None:
    callback = rt.tools.lightning_callback(**QUICK)
    beside = fitted(tmp_path / "beside", [callback], manual, **how)
    alone = fitted(tmp_path / "alone", [], manual, **how)
    states = (t.lightning_module.state_dict() for t in (beside, alone))
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    assert beside.callback_metrics["train_loss"] == alone.callback_metrics["train_loss"]
    assert matrix_flops(callback.live) == flops_of_a_batch()
    assert callback.result.figures.steps == 7  # the first of 8 batches warms up
    (graph, _), *_ = callback.live.graphs
    dtypes = {
        graph.values[op.outputs[0]].dtype for op in graph.ops if op.target == "aten.addmm.default"
    }
    assert dtypes == {"bf16" if "precision" in how else "fp32"}
    loss = any(op.target.startswith("aten.nll_loss") for op in graph.ops)
    assert loss is not manual  # what is outside of the modules is in the time alone


def test_lightning_logs_the_figures_every_so_many_batches(tmp_path: Path) -> None:
    callback = rt.tools.lightning_callback(**QUICK, clock=Ticks(1.0, 0.5))
    trainer = fitted(tmp_path, [callback])
    assert trainer.callback_metrics["rooftrace/samples_per_s"] == 8 / 0.5
    peak = load_chip(CHIP).peak("vector", "fp32")
    mfu = float(trainer.callback_metrics["rooftrace/mfu"])
    assert mfu == pytest.approx(flops_of_a_batch() / 0.5 / peak, rel=1e-5)  # a float32 there
    lines = Path(trainer.logger.experiment.metrics_file_path).read_text().splitlines()
    column = lines[0].split(",").index("rooftrace/mfu")
    assert sum(bool(line.split(",")[column]) for line in lines[1:]) == 4
    assert "rooftrace/mfu" in trainer.progress_bar_metrics


def test_a_lightning_step_that_needs_its_trainer_is_timed_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Curious(module_class()):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.trainer.max_epochs == 2
            return super().training_step(batch, batch_idx)

    callback = rt.tools.lightning_callback(**QUICK)
    with caplog.at_level(logging.WARNING, "rooftrace"):
        trainer = fitted(tmp_path, [callback], kind=Curious)
    told = [record.message for record in caplog.records if record.name == "rooftrace"]
    assert len(told) == 1 and "not counted" in told[0] and "attached to a `Trainer`" in told[0]
    assert "rooftrace/step_s" in trainer.callback_metrics
    assert "rooftrace/mfu" not in trainer.callback_metrics
    assert callback.result.figures.uncounted == 7


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rt.tools.trainer_callback, rt.tools.lightning_callback])
def test_an_option_that_there_is_not_is_an_error(make: Any) -> None:
    pytest.importorskip(
        "transformers" if make is rt.tools.trainer_callback else "pytorch_lightning"
    )
    with pytest.raises(RequestError, match=r"chp='l4': expected chip, .*did you mean 'chip'"):
        make(chp="l4")


@pytest.mark.parametrize(
    ("make", "packages"),
    [
        (rt.tools.trainer_callback, ["transformers"]),
        (rt.tools.lightning_callback, ["lightning.pytorch", "lightning", "pytorch_lightning"]),
    ],
)
def test_without_the_library_the_error_says_what_to_install(
    make: Any, packages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RequestError, match="not installed: pip install"):
        make(chip=CHIP)


def test_a_callback_before_training_prints() -> None:
    assert str(trainers.Watching({"chip": CHIP})) == "no training has begun"
