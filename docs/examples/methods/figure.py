"""The picture: the loss against steps and against seconds, a row for each problem."""

# Curvature of layers in full lines, gradients alone in dashes, controls in dots.  K-FAC,
# Adam and SGD have the same colors in all figures, and no other method has them.
STYLES = {
    "KFAC": ("#009E73", "-"),
    "EKFAC": ("#56B4E9", "-"),
    "KFOC": ("#CC79A7", "-"),
    "TNT": ("#D55E00", "-"),
    "block-tridiagonal": ("#000000", "-"),
    "SOAP": ("#D55E00", "--"),
    "Shampoo": ("#000000", "--"),
    "KL-Shampoo": ("#CC79A7", "--"),
    "Adam": ("#E69F00", "--"),
    "SGD": ("#0072B2", "--"),
    "KFAC, no model": ("#009E73", ":"),
    "gradient, model": ("#999999", ":"),
    "SOAP, carried": ("#D55E00", ":"),
}


def draw(result, path):
    """Draw the curves of each method's median seed, and write them to a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = result["problems"]
    figure = Figure(figsize=(6.6, 4.0 * len(parts)), dpi=180, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(parts), 2, squeeze=False, sharey="row")
    for (by_steps, by_seconds), part in zip(rows, parts.values(), strict=True):
        draw_curves(by_steps, part, against="steps")
        draw_curves(by_seconds, part, against="seconds")
        floor = part["floor"]
        above = f" above {floor:.2f}" if floor else ""
        by_steps.set_ylabel(f"training loss{above}")
        by_steps.set_title(part["title"], loc="left", fontsize=9)
        by_seconds.set_xlabel("CPU seconds")
        by_seconds.set_xscale("log")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def draw_curves(axes, part, *, against):
    """Draw one curve a method, and a line at each target."""
    from matplotlib.ticker import LogFormatter

    floor = part["floor"]
    for target in part["targets"]:
        axes.axhline(target - floor, color="0.5", linewidth=0.8, zorder=1)
    # What is above the first losses is a run that is failing.
    ends = []
    for name, method in part["methods"].items():
        run = median_run(method["confirmed"])
        points = [
            (x, loss - floor)
            for x, loss in zip(run[against], run["losses"], strict=True)
            if loss is not None and (against == "steps" or x > 0.0)
        ]
        color, line = STYLES[name]
        xs, ys = zip(*points, strict=True)
        ends += [ys[0], min(ys)]
        axes.semilogy(xs, ys, color=color, linestyle=line, linewidth=1.5, label=name)
        axes.plot(xs[-1], ys[-1], ".", color=color, markersize=6)
    axes.set_ylim(top=1.5 * max(ends), bottom=0.8 * min(ends))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.4)))
    axes.set_xlabel(against)
    axes.grid(True, which="major", color="0.93")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def median_run(runs):
    """Return the run in the middle: by steps to the last target, then by loss."""
    never = float("inf")

    def order(run):
        reached = run["reached"][-1]
        least = never if run["least"] is None else run["least"]
        return (reached[0] if reached else never, least)

    return sorted(runs, key=order)[(len(runs) - 1) // 2]
