"""Draws the JSON of dispatch_combine_perf: time and bytes per level for each algorithm, as SVG, and says what one sees.

  draw_demo.py IN.json OUT.svg"""
import html
import json
import sys

WIDTH, BAR, GAP, LEFT, CHART = 860, 22, 34, 90, 310
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


def draw(results, emulated):
    page = Page()
    page.text(20, 30, "Dispatch + combine of one MoE layer" + (" (EMULATED links)" if emulated else ""), 18, weight="bold")
    page.text(20, 50, "8 ranks as 2 nodes x 4, 512 tokens a rank, hidden 7168 bf16, top-8 of 256 experts", 12, color="#666")
    page.text(LEFT + 30, 80, "time, median (pale: predicted)", 13, weight="bold")
    page.text(LEFT + CHART + 110, 80, "bytes a rank sends between nodes / within", 13, weight="bold")
    slowest = max(max(r["time_us"]["p50"], r.get("predicted_us") or 0) for r in results)
    most = max(sum(level["bytes"] for level in r["levels"]) for r in results) or 1
    y = 95
    for r in results:
        page.text(LEFT + 20, y + 15, label(r), anchor="end")
        time = r["time_us"]["p50"]
        page.bar(LEFT + 30, y, CHART * time / slowest * 0.8, BAR - 7, COLORS["time"])
        if r.get("predicted_us"):
            page.bar(LEFT + 30, y + BAR - 6, CHART * r["predicted_us"] / slowest * 0.8, 6, COLORS["predicted"])
        page.text(LEFT + 36 + CHART * time / slowest * 0.8, y + 13, f"{time / 1000:.0f} ms", 12)
        x = LEFT + CHART + 110
        for i, level in enumerate(r["levels"]):
            width = CHART * level["bytes"] / most * 0.8
            page.bar(x, y, width, BAR, COLORS["outer" if i == 0 else "inner"])
            x += width + 1
        page.text(x + 5, y + 15, f"{outer_bytes(r) / 1e6:.0f} MB between nodes", 12)
        y += GAP
    return page.svg(y + 15)


def explain(results):
    """Two sentences from the figures themselves."""
    by_name = {r["algo"]: r for r in results}
    flat, hier = by_name.get("flat"), by_name.get("hier:2")
    if not flat or not hier or not outer_bytes(hier):
        return
    fewer = outer_bytes(flat) / outer_bytes(hier)
    faster = flat["time_us"]["p50"] / hier["time_us"]["p50"]
    print(f"All algorithms deliver the same rows, but flat and 2dh carry a token across the slow link once for each of its "
          f"eight choices and hier:2 once for each node: {outer_bytes(hier) / 1e6:.0f} MB instead of "
          f"{outer_bytes(flat) / 1e6:.0f} MB a rank, {fewer:.1f}x fewer.")
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
