"""Write the table of metrics of docs/integrations/metrics.md from the code."""

from groupstate.integrations.figures import METRICS, Metric
from tools.generated_part import DOCS, GeneratedPart

PAGE = DOCS / "integrations" / "metrics.md"
BEGIN = "<!-- generated from groupstate.integrations.figures.METRICS by `make docs`; edits are overwritten -->"
END = "<!-- end of the generated part -->"


def generated() -> str:
    head = "| metric | kind | labels | unit | |\n| --- | --- | --- | --- | --- |"
    return "\n\n".join([BEGIN, "\n".join([head, *map(_row, METRICS)]), END])


def _row(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{name}` | {metric.kind} | {labels} | {metric.unit} | {metric.meaning} |"


PART = GeneratedPart(PAGE, BEGIN, END, generated)

if __name__ == "__main__":
    PART.write()
