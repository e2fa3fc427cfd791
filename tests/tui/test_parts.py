"""Arithmetic of the waterfall, the sparkline and the bars."""

from __future__ import annotations

import pytest
from tui_documents import NOON, event, history, interrupted, report, worker

from lumenbox.tui.fields import Field, clock, compact, row
from lumenbox.tui.history import INTERVAL_S, KEPT, History, levels, sparkline
from lumenbox.tui.waterfall import Span, bar, spans, waterfall
from lumenbox.tui.workers import pages_bar


def test_phases_stand_where_they_happened() -> None:
    found = {span.name: (span.start_s, span.end_s) for span in spans(report())}
    assert list(found) == ["detect", "fence", "plan", "first token", "respawn", "recovered"]
    assert found["detect"] == (0.0, 0.010)
    assert found["fence"] == pytest.approx((0.010, 0.030))
    assert found["plan"] == pytest.approx((0.030, 0.040))
    assert found["first token"] == pytest.approx((0.040, 0.120))
    assert found["respawn"] == pytest.approx((0.040, 0.400))
    assert found["recovered"] == (0.120, 0.160)


def test_phases_of_streams_need_streams() -> None:
    names = [span.name for span in spans(report(requests=[], first_token_s=None, recovered_s=None))]
    assert names == ["detect", "fence", "plan", "respawn"]


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (Span("x", 0.0, 1.0), "████████"),
        (Span("x", 0.0, 0.5), "████"),
        (Span("x", 0.5, 1.0), "    ████"),
        (Span("x", 0.25, 0.3125), "  ▌"),
        (Span("x", 0.5, 0.5), "    ▏"),
        (Span("x", 1.0, 1.0), "       █"),
        (Span("x", 0.75, None), "      ██"),
    ],
)
def test_bars_of_the_waterfall(span: Span, expected: str) -> None:
    assert bar(span, 1.0, 8) == expected


def test_a_recovery_under_way_shows_what_is_known() -> None:
    early = report(first_token_s=None, respawn_s=None, recovered_s=None, requests=[interrupted(1, stall_s=None)])
    shown = [line.plain for line in waterfall(early, 80)]
    assert shown[1] == "streams 1  reattach 1  recomputed tokens 9"
    assert [line.split()[-1] for line in shown[5:]] == ["…", "…", "…"]
    assert waterfall(report(detect_s=0.0, fence_s=0.0, plan_s=0.0, requests=[], respawn_s=None), 80)


def test_samples_are_taken_at_intervals_and_forgotten() -> None:
    past = History().after(0.0, 0).after(INTERVAL_S / 2, 10)
    assert len(past.samples) == 1
    for number in range(2 * KEPT):
        past = past.after(float(number), 5 * number)
    assert len(past.samples) == KEPT
    assert set(past.rates) == {5.0}


def test_failures_mark_the_interval_they_fell_in() -> None:
    lost = [event(3, "worker_dead", 1, why="signal"), event(5, "worker_dead", 1, why="restart"), event(1, "chaos", 1)]
    assert history().failures(lost) == [False, False, True, False, False, False]


def test_sparkline_ends_at_now_and_fits() -> None:
    bars, marks = sparkline(history(), [event(3, "worker_dead", 1)], 40)
    assert bars.plain.endswith("▂▄▆█ █  peak 400")
    assert marks.plain.index("✕") == bars.plain.index("▆")
    short, _ = sparkline(history(), [], 22)
    assert short.plain == "tok/s ▆█ █  peak 400"
    assert sparkline(History().after(NOON, 5), [], 40) == []


def test_levels() -> None:
    assert levels([0, 1, 50, 100], 100) == " ▁▄█"
    assert levels([0, 0], 0) == "  "


def test_pages_bar_shows_whatever_is_there() -> None:
    assert pages_bar(worker(0, pages_used=1, pages_cached=1, pages_total=10_000), 8) == "█▒······"
    assert pages_bar(worker(0, pages_used=512, pages_cached=0), 8) == "████████"
    assert pages_bar(worker(0, pages_used=0, pages_cached=0, pages_total=0), 8) == "········"


def test_fields_go_by_rank() -> None:
    fields = [Field("first", "", 1), Field("keep"), Field("last", "", 2)]
    assert row(fields, 20).plain == "first  keep  last"
    assert row(fields, 16).plain == "first  keep"
    assert row(fields, 10).plain == "keep"
    assert row(fields, 3).plain == "ke…"


def test_numbers() -> None:
    assert (compact(9999), compact(33_000), compact(0.4)) == ("9999", "33k", "0")
    assert (clock(7.9), clock(97_800)) == ("0:00:07", "27:10:00")
