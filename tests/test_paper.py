"""The table beside the paper's figures is made from rows, says where there are none, and names what exists."""

import re
import runpy
import tomllib
from pathlib import Path

import numpy as np
import pytest

from bench import claims, harness, paper, paper_figures
from bench.paper import Figure, Plot

ROOT = Path(__file__).resolve().parent.parent
ROW = {"unit": "us", "date": "2026-01-02", "machine": "a processor, 2 cores, 8 GiB", "versions": {}}
GPU = ROW | {"machine": "a processor, 16 cores, 126 GiB, 1 x NVIDIA H200"}


def rows(*given: dict) -> dict[str, harness.Row]:
    return paper.latest([(harness.Row(**row), "") for row in given])


def test_cells_by_hand():
    found = rows(
        ROW | {"name": "a", "value": 12.3456, "spread": (12.0, 13.0), "fraction_of_limit": 0.5},
        GPU | {"claim": "E.b1", "name": "a", "value": 24_000.0},
        GPU | {"name": "c", "value": 36_000.0},
        ROW | {"name": "share", "value": 0.875, "unit": "share"},
    )
    figures = [
        Figure(
            "1", "x | y", "about 2", rows=(("one", "a"), ("two", "E.b1"), ("three", "b")), command="go; stop", why="w"
        ),
        Figure(
            "2", "r", "t", rows=(("s", "share"),), ratio=(("r", "c", "E.b1"), ("q", "a", "c")), command="go", why="w"
        ),
        Figure("3", "nothing", "t", cannot="no card"),
    ]
    assert paper.table(figures, found).splitlines()[2:] == [
        "| 1 | x \\| y | about 2 | one: 12.3 us (12 to 13), 50% of the limit, a processor, 2026-01-02<br>"
        "two: 24,000 us, H200, 2026-01-02<br>three: not measured | `go`<br>`stop` | w |",
        "| 2 | r | t | s: 87.5%, a processor, 2026-01-02<br>r: 1.50x, H200, 2026-01-02<br>"
        "q: not measured on one machine in one unit | `go` | w |",
        "| 3 | nothing | t | cannot be rebuilt here | - | no card |",
    ]


def test_the_newest_row_counts():
    older, newer = ROW | {"name": "a", "value": 1.0}, ROW | {"name": "a", "value": 2.0, "date": "2026-01-03"}
    assert rows(newer, older)["a"].value == rows(older, newer)["a"].value == 2.0


@pytest.mark.parametrize(
    "fields",
    [{}, {"rows": (("a", "b"),)}, {"cannot": "x", "rows": (("a", "b"),), "command": "c", "why": "w"}],
)
def test_a_figure_is_rebuilt_or_says_why_not(fields):
    with pytest.raises(ValueError, match="figure 9 must have rows"):
        Figure("9", "what", "theirs", **fields)


def test_the_list_names_claims_and_modules_that_exist():
    """A claim that nobody makes, or a command that nobody can type, would stay 'not measured' for ever."""
    known = {claim.id for claim in claims.read_claims()[1]}
    sources = "".join(path.read_text() for path in sorted((ROOT / "bench").glob("*.py")))
    for figure in paper.read_figures():
        keys = [key for _, key in figure.rows] + [key for _, *both in figure.ratio for key in both]
        bars = figure.plot.bars if figure.plot else ()
        keys += [key for _, *some in bars for key in some if isinstance(key, str)]
        for key in keys:
            if re.fullmatch(r"[A-G]\.\w+", key):
                assert key in known
            elif key.startswith("paper: "):
                assert re.split(r"[,0-9]", key.removeprefix("paper: "))[0].strip() in sources, key
            else:
                assert any(row.name == key for row, _ in harness.read_rows()) or key in sources, key
        for module in re.findall(r"python -m bench\.(\w+)", figure.command):
            assert (ROOT / "bench" / f"{module}.py").exists(), module


def test_an_unknown_field_is_refused(tmp_path):
    path = tmp_path / "figures.toml"
    path.write_text('[[figure]]\nfigure = "1"\nwhta = "x"\n')
    with pytest.raises(ValueError, match="figure 1 has the unknown field 'whta'"):
        paper.read_figures(path)


def test_the_page_is_the_generators_but_for_our_numbers(tmp_path, monkeypatch, capsys):
    """Rows are added all the time; everything else in the table must be as it would be written now."""

    def without_ours(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        return [
            "|".join(cell for place, cell in enumerate(re.split(r"(?<!\\)\|", line)) if place != 4) for line in lines
        ]

    text = paper.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(paper, "PAGE", tmp_path / "paper.md")
    paper.PAGE.write_text(text, encoding="utf-8")
    assert paper.main(["write"]) == 0
    assert without_ours(paper.PAGE.read_text(encoding="utf-8")) == without_ours(text), "remedy: make figures"
    assert paper.main(["write"]) == 0 and "already up to date" in capsys.readouterr().out
    paper.PAGE.write_text("no markers", encoding="utf-8")
    assert paper.main(["write"]) == 2
    assert "0 pairs of <!-- figures:begin -->" in capsys.readouterr().err


def test_bars_by_hand():
    plot = Plot("us", bars=(("theirs", 8.0), ("ours", "a"), ("both", "a", "b"), ("nobody's", "c"), ("half", "b", "c")))
    found = rows(ROW | {"name": "a", "value": 6.0}, ROW | {"name": "b", "value": 4.0})
    drawn = paper_figures.bars("t", plot, found)
    assert drawn.missing == ("nobody's", "half") and drawn.chart is not None
    assert re.findall(r"<title>([^<]*) (here|ECHO's paper)</title>", drawn.chart) == [
        ("theirs: 8: 0", "here"), ("theirs: 8: 8", "ECHO's paper"),
        ("ours: 6: 6", "here"), ("ours: 6: 0", "ECHO's paper"),
        ("both: 1.5: 1.5", "here"), ("both: 1.5: 0", "ECHO's paper"),
    ]  # fmt: skip
    assert paper_figures.bars("t", plot, {}) == paper_figures.Drawn(None, ("ours", "both", "nobody's", "half"))
    with pytest.raises(ValueError, match="either bars or the name"):
        Plot()


def test_a_gain_is_without_overlap_over_with_it():
    """The faster way to count it without: the sum of both parts, 90 + 80, or both in turn, 160."""
    name = "scores and recall, 16 x 131072, fp8 records, hit rate 0.9"
    shapes = {"hit": 0.9, "indexer_us": 90.0, "link_us": 80.0}
    some = [GPU | {"name": f"{name}: {way}", "value": us, "shapes": shapes} for way, us in WAYS.items()]
    drawn = paper_figures.gains("t", rows(*some))
    assert drawn.missing == ("bf16 records",) and drawn.chart is not None
    assert "H200, fp8 records: 0.9, 1.6<" in drawn.chart and "ECHO's best, H20: 0.9, 1.51<" in drawn.chart
    assert paper_figures.gains("t", rows(some[1])).missing == ("bf16 records", "fp8 records")


WAYS = {"in turn": 160.0, "fused": 100.0}


def test_every_plot_is_drawn_or_says_what_is_missing():
    text = paper.PAGE.read_text(encoding="utf-8")
    made, files = paper_figures.plots(paper.read_figures(), paper.latest(harness.read_rows()))
    assert all(f"({paper_figures.FOLDER}/{name})" in made for name in files) and len(files) >= 8
    on_disk = {path.name for path in (paper.PAGE.parent / paper_figures.FOLDER).glob("paper-*.svg")}
    assert on_disk == set(re.findall(r"figures/(paper-[^)]*)\)", text)), "remedy: make figures"
    assert made.count("### Figure ") == made.count("```sh") == made.count("python -m bench.paper write")


def test_decisions_name_all_three_and_a_reason():
    text = paper.PAGE.read_text(encoding="utf-8")
    lines = text[text.index("## Decisions") :].splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert table[0] == ["question", "paper", "artifact", "here", "why"] and len(table) > 15
    assert all(len(cells) == 5 and all(cells) for cells in table)


def test_what_a_cpu_counts_needs_no_trace(tmp_path):
    """The bytes, against the formulas of the paper and of the design."""
    record = paper._recorder(tmp_path)
    paper._token_bytes(record)
    paper._metadata(record)
    found = {row.name.removeprefix("paper: "): row.value for row, _ in harness.read_rows(tmp_path)}
    assert found["device bytes of a token, resident"] == 61 * (1152 + 132)
    assert found["device bytes of a token, offloaded, its slots apart"] == 61 * (132 + 4)
    assert found["metadata of a layer, N_H 2,000,000, N_G 200,000"] == 4 * 2_000_000 + 9 * 200_000


def test_the_notebook_runs_and_its_table_is_lossless(capsys):
    made = runpy.run_path(str(ROOT / "examples" / "notebook_thresholds.py"))
    policies, table = made["POLICIES"], made["table"]
    shares = {}
    for name, found in table.items():
        assert len(found) == len(made["LAYERS"])
        shares[name] = np.mean([row["useful"] / (row["useful"] + row["recalled"]) for row in found])
        for row, never in zip(found, table["never"], strict=True):
            assert (row["hits"], row["useful"] + row["recalled"]) == (never["hits"], never["recalled"])
    assert shares["never"] == 0 < shares["ema 0.5"] < 0.99 < shares["clairvoyant"]
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{re.escape(name)} .*found .*wasted", printed, re.MULTILINE) for name in policies)
    text = (ROOT / "examples" / "notebook_thresholds.py").read_text()
    assert text.count("# %% ") >= 5 and text.startswith("# %% [markdown]")


def test_make_figures_does_both():
    assert tomllib.loads((ROOT / "bench" / "paper.toml").read_text())["figure"]
    target = re.search(r"^figures: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target and [line.split()[-1] for line in target[1].splitlines()] == ["measure", "write"]
