"""The table, in Markdown, of what `report` gathered."""

HEADER = "method", "step", "learning rate", "option"


def table(part):
    """Return one problem's table: a row for each method, the quickest in steps first."""
    easy, hard = part["targets"]
    columns = [
        *HEADER,
        f"steps to {easy:g}",
        f"seconds to {easy:g}",
        f"steps to {hard:g}",
        f"seconds to {hard:g}",
        f"settings that reach {hard:g}",
        "ms a step",
        f"test: {part['held_out_name']}",
    ]
    lines = [row(columns), row(["---"] * 4 + ["---:"] * (len(columns) - 4))]
    ordered = sorted(part["methods"].items(), key=lambda item: place(item[1]))
    lines += [row(cells(name, method)) for name, method in ordered]
    empty = [""] * (len(columns) - 2)
    lines += [row([name, "dense layers only", *empty]) for name in part["left_out"]]
    return "\n".join(lines)


def place(method):
    """Return what methods are ordered by."""
    never = float("inf")
    steps = [never if n is None else n for n in reversed(method["steps_to"])]
    return (*steps, method["least"] if method["least"] is not None else never)


def cells(name, method):
    """Return the cells of one method."""
    setting, option = method["chosen"], method["option"]
    cells = [
        name,
        method["rule"],
        f"{setting['learning_rate']:g}{edge(method, 'learning_rate')}",
        f"{option} {setting[option]:g}{edge(method, option)}",
    ]
    runs = len(method["confirmed"])
    for steps, seconds, reached in zip(
        method["steps_to"], method["seconds_to"], method["reached"], strict=True
    ):
        some = "" if reached in (0, runs) else f" ({reached} of {runs})"
        cells += ["never" if steps is None else f"{steps:g}", number(seconds, ".2f")]
        cells[-2] += some
    held_out = number(method["held_out"], ".2f")
    good = sum(run["reached"][-1] is not None for run in method["searched"])
    settings = f"{good} of {len(method['searched'])}"
    return [*cells, settings, number(method["milliseconds_a_step"], ".1f"), held_out]


def edge(method, option):
    """Return a mark for a best value at an edge of its grid."""
    return "*" if option in method["at_edge"] else ""


def number(value, form):
    """Return a number as text, or nothing."""
    return "" if value is None else format(value, form)


def row(texts):
    """Return one line of a table."""
    return "| " + " | ".join(texts) + " |"


def budget(part):
    """Say in a line what every method was given."""
    counts = {len(m["searched"]) for m in part["methods"].values()}
    (runs,) = counts
    return (
        f"{part['title']}: {part['examples']} examples, batches of "
        f"{part['batch_size']}. Each method: {runs} settings of at most "
        f"{part['steps']} steps."
    )
