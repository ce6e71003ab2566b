# SPDX-License-Identifier: Apache-2.0
"""Judges rows by their rules, and writes docs/papers.json, docs/papers.md and docs/papers.svg."""
import html
import json
import math
import textwrap
import os
import datetime

from .not_compared import NOT_COMPARED

TOLERANCES = "within", "points", "equal", "in"  # rules that compare; the others are one-sided

DOCS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))), "docs")
RECORD = os.path.join(DOCS, "papers.json")


def holds(rule, paper, ours):
    """A rule is ["within", share], ["points", difference], ["in", low, high], ["at least", figure], ["at most", figure] or ["equal"]."""
    kind = rule[0]
    if kind == "equal":
        return ours == paper
    if kind == "within":
        return abs(ours - paper) <= rule[1] * abs(paper)
    if kind == "points":
        return abs(ours - paper) <= rule[1] + 1e-9  # figures of two decimals are not exact in binary
    if kind == "in":
        return rule[1] <= ours <= rule[2]
    if kind == "at least":
        return ours >= rule[1]
    if kind == "at most":
        return ours <= rule[1]
    raise ValueError(f"unknown rule {rule!r}")


def rule_text(rule):
    kind = rule[0]
    if kind == "equal":
        return "equal"
    if kind == "within":
        return f"within {100 * rule[1]:g} %"
    if kind == "points":
        return f"off by at most {rule[1]:g}"
    if kind == "in":
        return f"from {rule[1]:g} to {rule[2]:g}"
    return f"{kind} {rule[1]:g}"


def text(value):
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "-" if value is None else str(value)


def judged(row):
    """Returns the row with its verdict. Every row must have all fields that the page shows."""
    missing = [name for name in ("paper", "item", "paper_value", "ours", "rule", "how", "command") if name not in row]
    if missing:
        raise ValueError(f"a row lacks {', '.join(missing)}: {row}")
    verdict = "holds" if holds(row["rule"], row["paper_value"], row["ours"]) else "differs"
    if verdict == "differs" and not row.get("why"):
        raise ValueError(f'{row["item"]}: differs ({text(row["ours"])} beside {text(row["paper_value"])}) and says not why')
    return row | {"verdict": verdict}


def is_goal(row):
    """A goal of this project: the paper prints no figure for it."""
    return row["paper_value"] is None


def counted(rows):
    """Says how many rows hold their rule, those with a tolerance apart from those with a one-sided rule. A row whose model is fitted to the
    paper's figures cannot disagree with them by much, and a goal is no figure of a paper: both are counted apart."""
    def share(chosen):
        return f'{sum(row["verdict"] == "holds" for row in chosen)} of {len(chosen)}'
    goals = [row for row in rows if is_goal(row)]
    fitted = [row for row in rows if row["how"] == "fitted"]
    rest = [row for row in rows if row not in goals and row not in fitted]
    close = [row for row in rest if row["rule"][0] in TOLERANCES]
    sided = [row for row in rest if row["rule"][0] not in TOLERANCES]
    words = (f"{share(rest)} rows hold their rule: {share(close)} agree with the paper within a tolerance, and {share(sided)} pass a one-sided "
             "rule")
    apart = [f"{share(part)} {what}" for part, what in ((fitted, "fitted rows hold theirs"), (goals, "goals of this project are met")) if part]
    return words + (f" (counted apart: {', and '.join(apart)})" if apart else "")


def key(row):
    return row["paper"], row["item"]


def read():
    if not os.path.exists(RECORD):
        return []
    with open(RECORD, encoding="utf-8") as f:
        return json.load(f)["rows"]


def missing(known, rows, papers):
    """Returns a sentence for each row of these papers that held in the record and was not computed."""
    new = {key(row) for row in rows}
    return [f"{paper}, {item}: held, and was not computed" for (paper, item), row in known.items()
            if paper in papers and row["verdict"] == "holds" and (paper, item) not in new]


def merged(known, rows):
    """Returns the rows of the record, with newly computed rows in their places."""
    new = {key(row): row for row in rows}
    return [new.pop(k, row) for k, row in known.items()] + list(new.values())


def write(rows):
    """Writes the record, and the page and the picture of it."""
    papers = list(dict.fromkeys(row["paper"] for row in rows))
    rows = [row for paper in papers for row in rows if row["paper"] == paper]
    with open(RECORD, "w", encoding="utf-8") as f:
        json.dump({"date": datetime.date.today().isoformat(), "rows": rows}, f, indent=1)
        f.write("\n")
    write_page()


def write_page():
    """Writes the page and the picture of the rows that are in the record."""
    with open(RECORD, encoding="utf-8") as f:
        record = json.load(f)
    rows = record["rows"]
    with open(os.path.join(DOCS, "papers.md"), "w", encoding="utf-8") as f:
        f.write(page(rows, record["date"]))
    with open(os.path.join(DOCS, "papers.svg"), "w", encoding="utf-8") as f:
        f.write(picture(rows))


def page(rows, date):
    """Returns the page. What it does not compare comes from perf/paper_rows/not_compared.py."""
    papers = list(dict.fromkeys(row["paper"] for row in rows))
    lines = ["# The five papers compared with this library", "",
             "This page lists results of the five papers ([references](references.md)), this library's result for each, how it was obtained, and whether",
             "it holds the row's rule. `perf/papers --write` computes and writes all of it; `perf/papers` recomputes it and fails when a row that holds",
             "here no longer holds. `perf/papers --page` writes only this page and its picture, from the figures in `papers.json`.", "",
             f"{counted(rows)}. The record is of {date}.", "",
             "| rule | a row holds its rule when our figure |", "|-|-|",
             "| within 15 % | differs from the paper's by at most 15 % of the paper's |",
             "| off by at most 5 | differs from the paper's by at most 5 in the unit of the item; where that is %, these are percentage points |",
             "| from 1.18 to 2.57 | is in the range that the paper prints |",
             "| equal | is the paper's |",
             "| at least 1.25, at most 31.09 | is on that side of the threshold, however far: the rule is one-sided. The threshold is the row's own figure of the paper, "
             "or at least 85 % of it. Such a row says that the library is at least that good, not that the two figures agree |", "",
             "\"Run\" means ranks of one CPU host, on paced links where the item names bandwidths; \"simulated\" means the plan's steps under the cost",
             "reader; \"solved\" means the answer of a solver on data of the paper's size; \"counted\" means a count over drawn tokens; \"closed form\" means the",
             "paper's equation, evaluated by the library. \"Fitted\" means that a parameter which the paper does not print was chosen so that this very",
             "figure comes out: such a row shows that the model can express the figure, not that it predicts it.", "",
             "![The library's figure over the paper's, row by row](papers.svg)", ""]
    for paper in papers:
        all_of_it = [row for row in rows if row["paper"] == paper]
        mine = [row for row in all_of_it if not is_goal(row)]
        lines += [f"## {paper}", "", "| item | paper | ours | rule | verdict | how |", "|-|-|-|-|-|-|"]
        for row in mine:
            lines.append(f'| {row["item"]} | {text(row["paper_value"])} | {text(row["ours"])} | {rule_text(row["rule"])} | '
                         f'{row["verdict"]} | {row["how"]} |')
        lines += [""] + goals([row for row in all_of_it if is_goal(row)])
        commands = list(dict.fromkeys(row["command"] for row in all_of_it))
        lines += ["Commands: " + ", ".join(f"`{c}`" for c in commands) + ".", ""]
        lines += reasons(all_of_it)
    lines += ["## Not compared, and why", ""]
    for paper in papers:
        lines += [f"**{paper}**", ""] + [f"- {name}: {why}" for name, why in NOT_COMPARED.get(paper, {}).items()] + [""]
    return "\n".join(lines).rstrip() + "\n"


def goals(rows):
    """Returns the table of a paper's goals, or nothing where there are none."""
    if not rows:
        return []
    lines = ["Goals of this project. The paper prints no figure for what they run.", "", "| item | goal | ours | verdict | how |", "|-|-|-|-|-|"]
    for row in rows:
        met = "met" if row["verdict"] == "holds" else "missed"
        lines.append(f'| {row["item"]} | {rule_text(row["rule"])} | {text(row["ours"])} | {met} | {row["how"]} |')
    return lines + [""]


def reasons(rows):
    """Returns a line for each reason, with the items that it is given for."""
    items = {}
    for row in rows:
        if row.get("why"):
            items.setdefault(row["why"], []).append(row["item"])
    lines = [f'- {"; ".join(names)}: {why}' for why, names in items.items()]
    return lines + ([""] if lines else [])


def picture(rows):
    """Draws a point for each row whose two figures have a ratio: ours over the paper's, on a logarithmic axis."""
    drawn = [row for row in rows if all(isinstance(row[n], (int, float)) and row[n] > 0 for n in ("paper_value", "ours"))]
    step, line, top, left, right, width = 17, 12, 90, 400, 40, 800
    labels = [textwrap.wrap(row["item"], 56) for row in drawn]  # more letters would leave the frame
    height = top + step * (len(drawn) + len({r["paper"] for r in drawn})) + line * sum(len(l) - 1 for l in labels) + 46
    ratios = [row["ours"] / row["paper_value"] for row in drawn] or [1]
    low, high = math.log2(min(0.5, *ratios)), math.log2(max(2, *ratios))
    if high - low > 8:  # a solver that is a thousand times faster is an arrow at the edge
        low, high = max(low, -4), min(high, 4)

    def x(ratio):
        at = (min(max(math.log2(ratio), low), high) - low) / (high - low)
        return left + at * (width - left - right)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
             'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>',
             '<text x="20" y="28" font-size="17" font-weight="bold">Our figure over the paper\'s</text>',
             '<text x="20" y="48" font-size="12" fill="#555">filled: the row keeps its rule; open: it does not. The band is 10 % to each side.'
             ' An arrow: the figure lies beyond the edge.</text>']
    bottom = height - 40
    parts.append(f'<rect x="{x(1 / 1.1):.1f}" y="{top - 10}" width="{x(1.1) - x(1 / 1.1):.1f}" height="{bottom - top + 10}" fill="#e8f0e8"/>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        parts.append(f'<line x1="{x(2 ** power):.1f}" x2="{x(2 ** power):.1f}" y1="{top - 10}" y2="{bottom}" stroke="#ddd"/>')
        label = f"{2 ** power:g}" if power >= 0 else f"1/{2 ** -power}"
        for y in top - 16, bottom + 18:
            parts.append(f'<text x="{x(2 ** power):.1f}" y="{y}" font-size="11" text-anchor="middle" fill="#444">{label}</text>')
    y, paper = top, None
    for row, ratio, label in zip(drawn, ratios, labels):
        if row["paper"] != paper:
            paper = row["paper"]
            parts.append(f'<text x="20" y="{y + 4}" font-size="12" font-weight="bold">{html.escape(paper)}</text>')
            y += step
        good = row["verdict"] == "holds"
        parts += [f'<text x="{left - 12}" y="{y + 4 + line * i}" font-size="11" text-anchor="end" fill="#222">{html.escape(words)}</text>'
                  for i, words in enumerate(label)]
        paint = f'fill="{"#2f6db5" if good else "white"}" stroke="{"#2f6db5" if good else "#c8553d"}" stroke-width="1.6"/>'
        if low - 1e-9 <= math.log2(ratio) <= high + 1e-9:
            parts.append(f'<circle cx="{x(ratio):.1f}" cy="{y}" r="4.5" {paint}')
        else:
            tip = 7 if math.log2(ratio) > high else -7
            parts.append(f'<path d="M{x(ratio) - tip / 2:.1f} {y - 5} L{x(ratio) + tip:.1f} {y} L{x(ratio) - tip / 2:.1f} {y + 5} Z" {paint}')
        y += step + line * (len(label) - 1)
    return "\n".join(parts) + "\n</svg>\n"
