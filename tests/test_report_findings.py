"""docs/findings.md says what the recorded rows say; rules are compared where they waste equally much."""

import json
import math
from typing import Any

import pytest

from bench import findings, findings_page, findings_rows
from echo_jax.report import rows
from tests.test_report_pages import row


def test_the_page_and_its_figures_are_made_from_the_recorded_rows():
    text = findings_page.PAGE.read_text(encoding="utf-8")
    made, files = findings_page.rewrite(text)
    assert made == text, "run `python -m bench.findings write`"
    assert files == {name: (findings_page.FIGURES / name).read_text(encoding="utf-8") for name in files}
    shown = {path.name for path in findings_page.FIGURES.glob("findings-*.svg")}
    assert set(files) == shown and all(f"(figures/{name})" in text for name in files)
    under = text.count("```sh\npython -m bench.findings run ") + text.count("```sh\npython -m bench.rivals_quality\n")
    assert under == len(findings_page.BLOCKS)  # a command under each


def test_a_page_with_an_unknown_or_a_missing_block_is_refused():
    with pytest.raises(ValueError, match="the page has blocks"):
        findings_page.rewrite("<!-- findings:begin nothing -->\n<!-- findings:end -->")


def test_time_at_a_waste_is_linear_between_points_and_nothing_beyond_them():
    points = [(0.0, 10.0), (4.0, 6.0), (4.0, 5.0), (8.0, 7.0)]
    assert [findings_rows.at_waste(points, waste) for waste in (0, 1, 6, 8)] == [10.0, 9.0, 6.0, 7.0]
    assert math.isnan(findings_rows.at_waste(points, 8.1))


def test_rules_are_compared_at_the_waste_of_ema():
    """EMA wastes 40 rows (2 KB a step) for 3 us. The other rule wastes 60 for 2 us and 20 for 3 us: 2.5 us at 40."""
    shifts = {1.0: (60, 2.0), -1.0: (20, 3.0), -0.5: (20, 3.0), 0.5: (60, 2.0), 0.0: (60, 2.0)}
    some = [row(0, policy="never", wasted=0, exposed=9.0, useful=0)]
    for shift, (wasted, exposed) in shifts.items():
        some.append(row(0, policy=findings.shifted("last", shift), wasted=wasted, exposed=exposed))
        some.append(row(0, policy=findings.shifted("ema", shift), wasted=40, exposed=3.0))
    some.append(row(0, policy="trend"))  # without its shifts it takes no part
    made = rows.sections(some)
    (ratios,) = findings_rows.at_equal_waste(made).values()
    assert ratios == pytest.approx({"ema": 1.0, "last": 2.5 / 3.0}) and findings_rows.best_rule(made) == "last"
    assert findings_rows.geometric_mean([2.0, 0.5, math.nan]) == pytest.approx(1.0)


def test_a_trace_recorded_anew_replaces_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "FOLDER", tmp_path)
    some: list[dict[str, Any]] = [row(0, policy="ema", wasted=wasted) for wasted in (7, 9)]
    some[1]["key"]["trace_digest"] = "another"
    (tmp_path / "ema.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
    (section,) = findings_rows.sections("ema")
    assert section.lines[0].per_step("wasted") == some[1]["wasted"] / (section.head["steps"] - section.head["skip"])


def test_no_rule_is_judged_where_it_was_tuned():
    assert not set(findings.TUNING) & set(findings.UNSEEN)
    recorded = {name: {section.name for section in findings_rows.sections(name)} for name in ("rules", "unseen")}
    assert recorded == {"rules": set(findings.TUNING), "unseen": set(findings.UNSEEN)}
