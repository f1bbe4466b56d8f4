"""Reports: rows become sections, sections become numbers in tables and marks at the right places."""

import copy
import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from echo_jax.replay import rows as replay_rows
from echo_jax.report import commands, figures, pages, rows, svg

KEY = {
    "trace": "synth:mix,layers=3,requests=2,top_k=16,steps=30,context=256",
    "trace_digest": "0",
    "seed": 0,
    "archetype": "hot",
    "kind": "full",
    "layer": 0,
    "requests": 2,
    "capacity": 256,
    "top_k": 16,
    "steps": 30,
    "skip": 10,
    "record_format": "bf16",
    "record_bytes": 1000,
    "cost_models": {"h200": "1"},
    "policy": "ema",
    "eviction": "lru",
    "cap": "64",
    "slots_per_request": 32,
    "pool": "shared",
    "rule": "exact",
    "form": "",
    "own_classes": {},
}


def row(layer, kind="replay", *, useful=20, wasted=40, exposed=3.0, hit_rate=0.5, **key):
    """A row of 20 counted steps; what varies by layer is a number of its own."""
    head = {"row": kind, "schema": 1, "key": KEY | {"layer": layer} | key}
    if kind == "series":
        return head | {"kth_score": [1.0, 2.0, None, 4.0], "predicted": ["inf", 1.0, 1.5, 3.0]}
    spread = {"mean": exposed + layer, "p50": exposed, "p99": exposed + 10 * layer}
    never = head["key"]["policy"] == "never"
    return head | {
        "counted_steps": 20,
        "hit_rate": hit_rate + 0.1 * layer,
        "useful": useful,
        "recalled": 60,
        "wasted": wasted,
        "wasted_bytes_per_step": wasted * 1000 / 20,
        "host_to_device_bytes": (useful + 60 + wasted) * 1000,
        "prefetched_share": useful / (useful + 60),
        "candidates_per_k": 1.25,
        "threshold_error": {"rank": None if never else 0.25 + layer},
        "missed_share": 0.0,
        "nan_scores": 3,
        "cost": {"h200": {"indexer_us": 5.0, "without_overlap_us": spread, "with_overlap_us": spread}},
    }


NEVER = {"policy": "never", "useful": 0, "wasted": 0, "exposed": 4.0}


@pytest.fixture
def write(tmp_path):
    def write(*some, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(one) + "\n" for one in some))
        return path

    return write


def test_schema_is_the_one_that_replays_write():
    """The two rooms do not import each other."""
    assert rows.SCHEMA_VERSION == replay_rows.SCHEMA_VERSION


def test_a_section_for_each_trace_and_a_line_for_each_setting(write):
    other = row(0, trace="echo-tiny-manual")
    same = row(1)
    path = write(row(1), other, row(0), row(0, "series"), row(0, **NEVER), row(1, **NEVER), same)
    first, second = rows.read([path, write(row(0, skip=5), name="more.jsonl")])[:2]
    assert first.name == KEY["trace"] and second.name == "echo-tiny-manual"
    ema, never = first.lines
    assert [one["key"]["layer"] for one in ema.rows] == [0, 1] == list(first.layers)
    assert list(ema.series) == [0] and not never.series
    assert first.label(ema) == "ema" and second.label(second.lines[0]) == "ema"
    assert ema.mean("cost", "h200", "with_overlap_us", "mean") == 3.5
    assert ema.highest("cost", "h200", "with_overlap_us", "p99") == 13.0
    assert ema.per_step("wasted") == 2.0 and math.isnan(never.mean("threshold_error", "rank"))
    assert len(rows.read([path, write(row(0, skip=5), name="more.jsonl")])) == 3  # counted otherwise: not comparable


def test_only_layers_that_all_settings_have_are_compared(write):
    (section,) = rows.read([write(row(0), row(1), row(2), row(1, **NEVER), row(2, **NEVER))])
    assert section.layers == (1, 2) and section.left_out == 1
    assert [line.mean("hit_rate") for line in section.lines] == pytest.approx([0.65, 0.65])
    assert "1 layers that only some settings have are left out" in " ".join(figures.notes(section))
    with pytest.raises(ValueError, match="2 settings .* have no layer in common, of 2 layers"):
        rows.read([write(row(0), row(1, **NEVER))])


def test_a_changed_class_of_the_same_name_is_another_setting(write):
    (section,) = rows.read([write(row(0, own_classes={"mine:A": "1"}), row(0, own_classes={"mine:A": "2"}))])
    assert len(section.lines) == 2


@pytest.mark.parametrize(
    "some, says",
    [
        ([], "0 rows of replays in .*rows.jsonl; write some with `echo-jax replay"),
        ([row(0, "series")], "0 rows of replays"),
        ([row(0), row(1) | {"schema": 2}], "rows.jsonl:2 has schema 2 but .*rows.jsonl:1 has 1; .* replay the older"),
        ([row(0) | {"schema": 0}], "rows.jsonl:1 has schema 0 but this version reads 1; replay the trace again"),
        ([row(0), {"row": "config"}], "rows.jsonl:2 is a row 'config', not one of a replay"),
        ([{"claim": "G.replay_s", "value": 1.0}], "rows.jsonl:1 is no row, not one of a replay"),
        (["text"], "rows.jsonl:1 is no row"),
    ],
)
def test_rows_that_do_not_belong_are_refused_by_place(write, some, says):
    with pytest.raises(ValueError, match=says):
        rows.read([write(*some)])


def test_what_is_no_json_is_refused_by_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(0)) + "\nhello\n")
    with pytest.raises(ValueError, match="rows.jsonl:2 is no JSON row"):
        rows.read([path])
    with pytest.raises(FileNotFoundError):
        rows.read([tmp_path / "nowhere.jsonl"])


# ---- figures ---------------------------------------------------------------------------------------------


def texts(chart):
    return ["".join(one.itertext()) for one in ElementTree.fromstring(chart).iter("{http://www.w3.org/2000/svg}text")]


def said(chart):
    """The titles of the marks: name and numbers."""
    titles = [
        one.find("{http://www.w3.org/2000/svg}title")
        for one in ElementTree.fromstring(chart).iter()
        if one.tag.endswith(("circle", "rect"))
    ]
    return [title.text for title in titles if title is not None]


def test_figures_show_the_numbers_of_the_rows(write):
    both = [row(layer, slots_per_request=slots) for layer in (0, 1) for slots in (32, 64)]
    never = [row(layer, slots_per_request=slots, **NEVER) for layer in (0, 1) for slots in (32, 64)]
    (section,) = rows.read([write(*both, row(1, "series"), *never)])
    made = {figure.name: figure for figure in figures.figures(section)}
    assert list(made) == ["speed-h200", "useful", "threshold", "hits", "pareto-h200"]
    assert said(made["speed-h200"].chart) == ["ema: 32, 8.5", "ema: 64, 8.5", "never: 32, 9.5", "never: 64, 9.5"]
    useful = said(made["useful"].chart)
    assert useful[:3] == ["ema: 1 copied ahead and used", "ema: 3 recalled", "ema: 2 copied in vain"]
    assert said(made["hits"].chart)[:2] == ["32 slots: 0, 50", "32 slots: 1, 60"]
    assert said(made["pareto-h200"].chart) == ["never: 0, 4.5", "ema: 2, 3.5"]
    assert "layer 1 (hot)" in made["threshold"].title and "125% more or fewer" in made["threshold"].caption
    assert all(figure.chart.count("NaN") + figure.chart.count("inf") == 0 for figure in made.values())


def test_figures_without_their_rows_are_left_out(write):
    (section,) = rows.read([write(row(0))])
    assert [figure.name for figure in figures.figures(section)] == ["useful"]


def test_the_front_holds_what_nothing_beats_in_both():
    points = {"a": (0.0, 9.0), "b": (5.0, 5.0), "c": (5.0, 6.0), "d": (9.0, 5.0), "e": (9.0, 1.0), "f": (5.0, 5.0)}
    assert figures.front_of(points) == ["a", "b", "e", "f"]


def test_policies_that_know_the_future_do_not_push_others_off_the_front(write):
    """A clairvoyant one beats everything, and is nobody's choice."""
    future = row(0, policy="margin:clairvoyant,0", wasted=0, exposed=0.5)
    (section,) = rows.read([write(row(0), row(0, **NEVER), future)])
    chart = {figure.name: figure.chart for figure in figures.figures(section)}["pareto-h200"]
    assert "margin:clairvoyant,0 (bound)" in texts(chart)
    line = next(one for one in ElementTree.fromstring(chart).iter() if one.tag.endswith("path"))
    assert line.get("d", "").count("L") == 1  # never and ema


def test_the_table_has_every_setting_and_says_what_is_none(write):
    (section,) = rows.read([write(row(0), row(0, **NEVER))])
    columns, cells = figures.table(section)
    first, second = (dict(zip(columns, line, strict=True)) for line in cells)
    assert first["setting"] == "ema" and first["wasted"] == "2.0" and first["KB in"] == "6" and first["hit"] == "50.0 %"
    assert second["off by"] == "-" and second["h200 P99"] == "4.0" and second["ahead"] == "0.0 %"
    assert "3 visible scores are NaN" in " ".join(figures.notes(section))


# ---- charts ----------------------------------------------------------------------------------------------


def test_marks_stand_where_their_numbers_are():
    x, y = svg.axis("x", [0, 10]), svg.axis("y", [0, 4])
    chart = svg.line_chart("t", x, y, [svg.Series("one", [(0, 0), (10, 4), (5, math.nan), (5, 1), (6, 2)], 0)])
    root = ElementTree.fromstring(chart)
    marks = [(float(one.get("cx", "")), float(one.get("cy", ""))) for one in root.iter() if one.tag.endswith("circle")]
    left, right, top, bottom = svg.LEFT, svg.WIDTH - svg.RIGHT, svg.TOP, svg.TOP + svg.PLOT_HEIGHT
    assert marks[:2] == [(left, bottom), (right, top)]
    assert marks[2] == pytest.approx(((left + right) / 2, bottom - svg.PLOT_HEIGHT / 4))
    lines = [one.get("d", "").count("L") for one in root.iter() if one.tag.endswith("path")]
    assert lines[:2] == [1, 1]  # broken where there is no number


def test_axes_hold_their_values_and_end_at_round_numbers():
    for values in ([3, 3], [0.0, 0.0], [-2, 5], [1e-4, 9e-4], [12345, 99999], [math.nan, 1.0, 7.3], []):
        axis = svg.axis("", values)
        finite = [value for value in values if math.isfinite(value)]
        assert all(axis.low - 1e-9 <= value <= axis.high + 1e-9 for value in finite) and axis.low < axis.high
        assert [axis.share(axis.low), axis.share(axis.high)] == [0, 1]
        assert axis.ticks[0][0] == pytest.approx(axis.low) and axis.ticks[-1][0] == pytest.approx(axis.high)
        assert 2 <= len(axis.ticks) <= 9 and len({text for _, text in axis.ticks}) == len(axis.ticks)
    assert [text for _, text in svg.axis("", [0, 3], least_step=1).ticks] == ["0", "1", "2", "3"]
    log = svg.log_axis("", [64, 16, 32])
    assert log.share(32) == pytest.approx(0.5) and [text for _, text in log.ticks] == ["16", "32", "64"]


def test_names_are_text_and_nothing_else():
    """A trace or a policy may be called anything."""
    name = '<script>&"x"'
    chart = svg.bar_chart(name, svg.axis("x", [0, 1]), [svg.Series(name, [(0, 1.0)], 0)], [name])
    assert "<script" not in chart and name in texts(svg.standalone(chart))
    assert ElementTree.fromstring(chart).get("aria-label") == name


def test_a_page_is_whole_and_asks_nobody_for_anything(write, tmp_path):
    name = 'synth:median<b>,"'
    sections = rows.read([write(row(0, trace=name), row(0, trace=name, **NEVER), row(0, "series", trace=name))])
    pages.write(pages.make(sections, ["rows.jsonl"], "out"), tmp_path / "out")
    page = (tmp_path / "out" / pages.HTML).read_text()
    ElementTree.fromstring(page.replace("<!doctype html>", "").replace('<meta charset="utf-8">', "").replace(
        '<meta name="viewport" content="width=device-width, initial-scale=1">', ""))  # fmt: skip
    rest = page.replace("http://www.w3.org/2000/svg", "")
    for word in ("http", "src=", "<link", "<script", "url(", "@import", "<b>"):
        assert word not in rest
    assert "prefers-color-scheme: dark" in page and page.count("<svg") == 3
    text = (tmp_path / "out" / pages.MARKDOWN).read_text()
    figure = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(figure) == 3
    for path in figure:
        assert "<style>" in (tmp_path / "out" / path).read_text()


# ---- commands --------------------------------------------------------------------------------------------


def test_commands_are_as_few_as_the_products_of_what_was_tried(write):
    trace = KEY["trace"]
    grid = [
        row(layer, policy=policy, slots_per_request=slots, cap=cap)
        for layer in (0, 1, 2) for policy in ("ema", "last") for slots in (32, 64) for cap in ("64", "budgeted:9,9")
    ]  # fmt: skip
    lone = [row(layer, policy="never", eviction="clock", pool="split") for layer in (0, 1, 2)]
    (section,) = rows.read([write(*grid, *lone)])
    assert commands.replay_commands(section, "r") == [
        f"echo-jax replay {trace} --policy ema last --sweep slots=32,64 'cap=64;budgeted:9,9' --skip 10 --output r",
        f"echo-jax replay {trace} --policy never --eviction clock --slots 32 --pool split --skip 10 --output r",
    ]
    assert commands.replay_commands(section, "r", section.lines[-1:])[0].split()[4] == "never"


def test_commands_say_in_full_what_a_missing_trace_cannot(write):
    rival: dict = row(0, trace="gone/trace", rule="freekv", policy="never", form="idealised", record_format="fp8")
    other = copy.deepcopy(rival)
    other["key"].update(rule="quest", slots_per_request=256)
    (section,) = rows.read([write(rival, other)])
    assert commands.replay_commands(section, "r") == [
        "echo-jax replay gone/trace --rival freekv quest --slots 32 --layers 0 --steps 30 --skip 10 "
        "--record-format fp8 --output r"
    ]
    assert [section.label(line) for line in section.lines] == [
        "freekv (idealised), 32 slots",
        "quest (idealised), 256 slots",
    ]
    assert section.at(32) == section.lines
