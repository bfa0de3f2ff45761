"""Line plots as plain SVG, legible in light and dark; nothing but the standard library."""

import math

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 150, 66, 52
LIGHT = ["#c0392b", "#2471a3", "#1e8449", "#7d3c98", "#b9770e", "#5d6d7e"]
DARK = ["#ff7b6b", "#6cb6ff", "#57d98a", "#d2a8ff", "#f2c14e", "#aab7c4"]


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;")


def short(value):
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e3:
        return f"{value / 1e3:g}k"
    return f"{value:g}"


def ticks(least, most):
    """Round values from zero to at least `most`, five or so."""
    step = 10 ** math.floor(math.log10(max(most, 1e-9) / 4))
    while most / step > 6:
        step *= 2.5 if str(step)[0] == "2" else 2
    count = math.ceil(most / step - 1e-9)
    return [step * i for i in range(count + 1)]


def lines(path, title, x_label, y_label, series, log_x=False):
    """Writes one line per (label, [(x, y), ...]), the first one bold; x by its logarithm if asked."""
    series = [(label, points) for label, points in series if points]
    if not series:
        return
    xs = [x for _, points in series for x, _ in points]
    scale = math.log10 if log_x else float
    low, high = scale(min(xs)), scale(max(xs))
    if low == high:
        low, high = low - 0.5, high + 0.5
    y_ticks = ticks(0, max(y for _, points in series for _, y in points))
    top = y_ticks[-1]

    def place(x, y):
        across = LEFT + (scale(x) - low) / (high - low) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)
        return across, down

    style = "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(LIGHT))
    dark = "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(DARK))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        "<style>.paper{fill:#ffffff}.ink{fill:#24292f}.grid{stroke:#d0d7de}.line{fill:none;stroke-width:2.2}"
        f"{style}@media (prefers-color-scheme:dark){{.paper{{fill:#161b22}}.ink{{fill:#e6edf3}}"
        f".grid{{stroke:#3d444d}}{dark}}}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<text class="ink" x="{LEFT}" y="26" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for value in y_ticks:
        _, down = place(xs[0], value)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        out.append(f'<text class="ink" x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{short(value)}</text>')
    marks = sorted(set(xs))
    if log_x and len(marks) > 8:
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        marks = [10**power for power in powers]
    for value in marks:
        across, _ = place(value, 0)
        base = HEIGHT - BOTTOM
        out.append(f'<line class="grid" x1="{across:.1f}" x2="{across:.1f}" y1="{base}" y2="{base + 5}"/>')
        out.append(f'<text class="ink" x="{across:.1f}" y="{base + 20}" text-anchor="middle">{short(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text class="ink" x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(f'<text class="ink" x="{LEFT}" y="{TOP - 16}">{escape(y_label)}</text>')
    for at, (label, points) in enumerate(series):
        color = at % len(LIGHT)
        path_points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        width = ' style="stroke-width:3.4"' if at == 0 else ""  # ours
        out.append(f'<polyline class="line s{color}"{width} points="{path_points}"/>')
        if len(points) <= 8:
            for point in points:
                x, y = place(*point)
                out.append(f'<circle class="f{color}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>')
    # The legend in the order in which the lines end, so that the eye finds them.
    order = sorted(range(len(series)), key=lambda at: -series[at][1][-1][1])
    for row, at in enumerate(order):
        down = TOP + 14 + 22 * row
        left = WIDTH - RIGHT + 16
        color = at % len(LIGHT)
        out.append(f'<line class="line s{color}" x1="{left}" x2="{left + 22}" y1="{down}" y2="{down}"/>')
        out.append(f'<text class="ink" x="{left + 28}" y="{down + 4}">{escape(series[at][0])}</text>')
    out.append("</svg>")
    with open(path, "w") as file:
        file.write("\n".join(out) + "\n")
