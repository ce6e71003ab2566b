# SPDX-License-Identifier: Apache-2.0
"""Draws the JSON of dispatch_combine_perf as SVG, time and bytes per level for each algorithm, and explains the picture.

  draw_demo.py IN.json OUT.svg"""
import html
import json
import sys

WIDTH, BAR, GAP = 800, 24, 42
# A panel: where its bars begin, and how long the longest one is. The space behind that is for the bar's label.
NAMES, TIME, TIME_LENGTH, BYTES, BYTES_LENGTH = 112, 124, 210, 440, 170
COLORS = {"time": "#2f6db5", "predicted": "#9db8d9", "outer": "#c8553d", "inner": "#e8b89b"}


class Page:
    def __init__(self):
        self.parts = []

    def text(self, x, y, words, size=13, anchor="start", color="#222", weight="normal"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
                          f'font-weight="{weight}">{html.escape(words)}</text>')

    def bar(self, x, y, width, height, color):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height}" rx="2" fill="{color}"/>')

    def svg(self, height):
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
                'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>')
        return head + "\n" + "\n".join(self.parts) + "\n</svg>\n"


def outer_bytes(result):
    return result["levels"][0]["bytes"] if result.get("levels") else 0


def label(result):
    plan = result.get("plan") or result["algo"]
    return result["algo"] if plan == result["algo"] else f'{result["algo"]} ({plan})'


def key(page, x, y, entries):
    """Draws small squares and what their colours mean, in a row."""
    for color, words in entries:
        page.bar(x, y - 10, 11, 11, COLORS[color])
        page.text(x + 16, y, words, 12, color="#444")
        x += 32 + 6.6 * len(words)


def draw(results, emulated):
    page = Page()
    page.text(20, 30, "Dispatch + combine of one MoE layer" + (" (EMULATED links)" if emulated else ""), 18, weight="bold")
    page.text(20, 52, "8 ranks as 2 nodes x 4, 512 tokens a rank, hidden 7168 bf16, top-8 of 256 experts", 13, color="#555")
    page.text(TIME, 86, "Median time", 14, weight="bold")
    key(page, TIME, 106, [("time", "measured"), ("predicted", "predicted")])
    page.text(BYTES, 86, "MB that all ranks send in one dispatch", 14, weight="bold")
    levels = results[0]["levels"]
    key(page, BYTES, 106, [("outer", f"between {levels[0]['name']}s")] + [("inner", "inside")] * (len(levels) > 1))
    slowest = max(max(r["time_us"]["p50"], r.get("predicted_us") or 0) for r in results)
    most = max(sum(level["bytes"] for level in r["levels"]) for r in results) or 1
    y = 124
    for r in results:
        page.text(NAMES, y + 17, label(r), anchor="end")
        time = r["time_us"]["p50"]
        page.bar(TIME, y, TIME_LENGTH * time / slowest, BAR - 8, COLORS["time"])
        if r.get("predicted_us"):
            page.bar(TIME, y + BAR - 7, TIME_LENGTH * r["predicted_us"] / slowest, 7, COLORS["predicted"])
        page.text(TIME + 6 + TIME_LENGTH * time / slowest, y + 13, f"{time / 1000:.0f} ms")
        x = BYTES
        for i, level in enumerate(r["levels"]):
            width = BYTES_LENGTH * level["bytes"] / most
            page.bar(x, y, width, BAR, COLORS["outer" if i == 0 else "inner"])
            x += max(width, 1) + 1
        inside = sum(level["bytes"] for level in r["levels"]) - outer_bytes(r)
        page.text(x + 6, y + 17, f"{outer_bytes(r) / 1e6:.1f} + {inside / 1e6:.1f} MB")
        y += GAP
    return page.svg(y + 4)


def explain(results):
    """Prints two sentences from the figures themselves."""
    by_name = {r["algo"]: r for r in results}
    flat, hier = by_name.get("flat"), by_name.get("hier:2")
    if not flat or not hier or not outer_bytes(hier):
        return
    fewer = outer_bytes(flat) / outer_bytes(hier)
    faster = flat["time_us"]["p50"] / hier["time_us"]["p50"]
    print(f"All algorithms deliver the same rows, but flat and 2dh carry a token across the slow link once for each of its "
          f"eight choices and hier:2 once for each node: {outer_bytes(hier) / 1e6:.0f} MB instead of "
          f"{outer_bytes(flat) / 1e6:.0f} MB in one dispatch of all ranks, {fewer:.1f}x fewer.")
    auto = by_name.get("auto")
    chosen = f', and auto chose {auto.get("plan") or "?"} by price before it ran' if auto else ""
    print(f"Dispatch and combine are {faster:.1f}x faster for it{chosen}.")


def main():
    source, target = sys.argv[1], sys.argv[2]
    with open(source, encoding="utf-8") as f:
        results = json.load(f)["results"]
    emulated = any(r.get("emulated") for r in results)
    with open(target, "w", encoding="utf-8") as f:
        f.write(draw(results, emulated))
    explain(results)
    print(f"Drawn in {target}" + (" (EMULATED)" if emulated else ""))
    wrong = sum(int(r.get("nwrong", 0)) for r in results)
    if wrong:
        print(f"{wrong} WRONG values", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
