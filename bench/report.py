"""Samples of bench/read.py into rows, and rows into JSON, a table and a chart."""
import json
import os
import statistics
from xml.sax.saxutils import escape

PALETTE = {"limb": "#1b7f5c", "sshfs": "#8c8fa3", "rclone webdav": "#5b7db1", "rclone http": "#86a9d6", "s3fs": "#c08a4e",
           "tar|ssh": "#b0b0b0", "rsync": "#cfcfcf"}


def spread(samples, value):
    """{min, median, max} and, where time was up before the end, the share that was done; or why not."""
    good = [(value(s), s["done"] / s["all"]) for s in samples if "error" not in s]
    good = [(v, done) for v, done in good if v is not None]
    if not good:
        errors = [s["error"] for s in samples if "error" in s]
        return {"error": errors[0] if errors else "nothing was measured"}
    figures = [v for v, _ in good]
    out = {"min": min(figures), "median": statistics.median(figures), "max": max(figures)}
    share = statistics.median(done for _, done in good)
    return out | ({"done": share} if share < 0.999 else {})


def row_of(row, link, by_tool, ceiling):
    """`by_tool`: {tool: its samples}, `limb` among them."""
    spreads = {tool: spread(samples, lambda s: row.value(s, link)) for tool, samples in by_tool.items()}
    limb, peers = spreads.pop("limb", None), {} if row.limb_only else spreads
    known = [p["median"] for p in peers.values() if "median" in p]
    out = {"work": row.work, "link": str(link), "unit": row.unit, "limb": limb, "peers": peers, "ceiling": ceiling,
           "ceiling_is": row.says, "lower_is_better": row.lower}
    mine = (limb or {}).get("median")
    best = (min if row.lower else max)(known, default=None)
    out["ratio_ceiling"] = mine / ceiling if mine and ceiling else None
    out["ratio_best_peer"] = (best / mine if row.lower else mine / best) if mine and best else None
    out["details"] = {tool: d for tool, samples in by_tool.items() if (d := details(samples, link))}
    if row.note:
        out["note"] = row.note
    return out


def details(samples, link):
    """Medians of what a sample says beside its main figure."""
    good = [s for s in samples if "error" not in s]
    figures = {
        "link_bytes_per_byte_read": [s["wire_bytes"] / s["bytes"] for s in good if s["bytes"] > 1 << 20 and s.get("wire_bytes")],
        "link_bytes_per_asked": [s["wire_bytes"] / s["asked_bytes"] for s in good if s.get("asked_bytes") and "wire_bytes" in s],
        "share_of_link": [s["wire_bytes"] / 1e6 / s["secs"] / link.rate for s in good if link.rate and "wire_bytes" in s],
        "p50_ms": [s["p50_ms"] for s in good if "p50_ms" in s],
        "slowest_ms": [1e3 * s["max_s"] for s in good if "max_s" in s],
    }
    for figure in ("cores", "anon_mib", "shared_mib"):
        figures["agent_" + figure] = [s["agent"][figure] for s in good if s.get("agent")]
    return {name: statistics.median(values) for name, values in figures.items() if values}


def short(x):
    return "–" if x is None else f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def cell(figures, whole=False):
    if not figures:
        return "–"
    if "error" in figures:
        return figures["error"].replace("|", "/").replace("\n", " ")[:60]
    names = ("min", "median", "max") if whole else ("median",)
    done = f" ({100 * figures['done']:.2g} % done)" if "done" in figures else ""
    return " / ".join(short(figures[n]) for n in names) + done


def table(rows):
    tools = [tool for tool in PALETTE if any(tool in row["peers"] for row in rows)]
    lines = ["| work | link | unit | limb min / median / max | " + "".join(f"{tool.replace('|', '-')} | " for tool in tools)
             + "ceiling | of the ceiling | × the best peer |", "|---" * (7 + len(tools)) + "|"]
    for row in rows:
        ratio = "–" if row["ratio_ceiling"] is None else f"{100 * row['ratio_ceiling']:.0f} %"
        lines.append(f"| {row['work']} | {row['link']} | {row['unit']}{', less is better' if row['lower_is_better'] else ''} | "
                     + " | ".join([cell(row["limb"], True), *(cell(row["peers"].get(tool)) for tool in tools),
                                   short(row["ceiling"]), ratio, short(row["ratio_best_peer"])]) + " |")
    lines.append("")
    for row in rows:
        said = [f"{tool} " + ", ".join(f"{name} {short(v)}" for name, v in figures.items())
                for tool, figures in row["details"].items() if not row["work"].startswith("agent-")]
        remark = "; ".join(filter(None, [row.get("note"), row["ceiling"] and f"ceiling: {row['ceiling_is']}", *said]))
        if remark:
            lines.append(f"- {row['work']}, {row['link']}: {remark}")
    return "\n".join(lines)


def chart(rows):
    """Bars, one group a row, each group on a scale of its own; the line is the ceiling."""
    rows = [row for row in rows if (row["limb"] or {}).get("median")]
    width, left, bar, gap, full = 860, 250, 15, 26, 480
    y, parts = 34, []

    def text(x, at, words, extra=""):
        parts.append(f'<text x="{x:.0f}" y="{at:.0f}" {extra}>{escape(words)}</text>')

    for row in rows:
        bars = {"limb": row["limb"]} | row["peers"]
        bars = {tool: f for tool, f in bars.items() if "median" in f}
        top = max([f["median"] for f in bars.values()] + [row["ceiling"] or 0])
        text(12, y + 12, f"{row['work']}, {row['link']}", 'font-weight="600"')
        text(12, y + 28, row["unit"] + (" (less is better)" if row["lower_is_better"] else ""), 'fill="#666"')
        height = bar * len(bars)
        for i, (tool, figures) in enumerate(bars.items()):
            size = max(1, full * figures["median"] / top)
            at = y + i * bar
            text(left - 6, at + 11, tool, 'text-anchor="end" fill="#444"')
            parts.append(f'<rect x="{left}" y="{at + 1}" width="{size:.0f}" height="{bar - 3}" fill="{PALETTE.get(tool, "#999")}"/>')
            text(left + size + 5, at + 11, cell(figures))
        if row["ceiling"]:
            x = left + full * row["ceiling"] / top
            parts.append(f'<path d="M{x:.0f} {y - 3}V{y + height + 1}" stroke="#c0392b" stroke-dasharray="3 2"/>')
        y += max(height, 30) + gap
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" font-family="sans-serif" font-size="11">'
            f'<rect width="{width}" height="{y}" fill="#fff"/>'
            '<text x="12" y="18" font-size="13">Medians of one run; the dashed line is the ceiling</text>')
    return head + "".join(parts) + "</svg>\n"


def write(rows, about, samples, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        json.dump({"rows": rows, "about": about, "samples": samples}, f, indent=1)
    with open(os.path.splitext(path)[0] + ".svg", "w") as f:
        f.write(chart(rows))
