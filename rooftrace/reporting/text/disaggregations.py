"""Prefill and decode on chips of their own in words: a row for each, and the cache between them."""

from __future__ import annotations

from rooftrace.costmodels.disaggregating import Disaggregated
from rooftrace.hardware.units import format_capacity, format_time
from rooftrace.reporting.view import model as view, units

_COLUMNS = (
    view.Column("phase", units.TEXT, "Phase", short="phase"),
    view.Column("chips", units.COUNT, "Chips", short="chips"),
    view.Column("batch", units.COUNT, "Batch of each", short="batch"),
    view.Column("seconds", units.SECOND, "Step", short="step"),
    view.Column("tokens_per_s_per_chip", units.RATE, "Tokens/s per chip", short="tokens/s/chip"),
    view.Column("exposed", units.SECOND, "Exposed communication", short="exposed"),
    view.Column("peak", units.CAPACITY, "Memory of a chip", short="memory"),
    view.Column("fits", units.WORDS, "Fits", short="fits", of=lambda s: "yes" if s.fits else "no"),
    view.Column("kv_bytes_per_token", units.BYTE, "Cache of a token, a chip", short="cache/token"),
)


def disaggregated_view(result: Disaggregated, output: view.Output) -> view.View:
    """A row for each phase, then what goes between them and how many chips of each balance."""
    sent = (
        f"cache of a request of {result.prompt:,} tokens: {format_capacity(result.kv_bytes)} from "
        f"chip to chip, {format_time(result.transfer)} over {result.system}, "
        f"{result.transfer_share:.1%} of a step of prefill for all of its requests"
    )
    balance = (
        f"{result.prompt:,} tokens in, {result.output:,} out: "
        f"{result.prefill_per_decode:.3g} chips of prefill for each of decode, "
        f"{result.output_tokens_per_s_per_chip:,.0f} tokens/s out per chip of both; "
        f"first token after {format_time(result.first_token)}"
    )
    notes = [view.Note(sent), view.Note(balance)]
    notes += [view.Note(f"assumed: {text}", "faint") for text in result.assumed]
    table = view.Table(columns=_COLUMNS, rows=[result.prefill, result.decode], padded=False)
    return view.View((view.Section(parts=[table, *notes]),), "Prefill and decode apart")
