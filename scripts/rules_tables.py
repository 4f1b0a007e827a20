"""Writes into the docs what the code says better: tables of the rules, and the list of all files.

A page says where: what stands between `<!-- rules: NAME -->` and `<!-- end of rules -->` is written from
buffer_service/rules/ and buffer_service/domain/policy.py, from what `rollout-buffer size` computes, or from the tree.

usage: rules_tables.py [--check]   (--check: write nothing, fail if a page is out of date)
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import get_type_hints

from buffer_cli.size import costs
from buffer_cli.size.sizing import Fleet, Machines, size
from buffer_service.domain.policy import ENUMS, MAY_BE_UNSET, UNSET, Between, RunPolicy
from buffer_service.rules.filters import FILTERS, NO_REWARD_BOUND
from buffer_service.rules.statistics import STATISTICS
from buffer_service.rules.transitions import GROUP_TRANSITIONS, NEW, TASK_TRANSITIONS
from scripts.lint_rooms import PRODUCT

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?<=<!-- rules: )(?P<name>[a-z ]+)(?P<open> -->\n).*?(?=<!-- end of rules -->)", re.DOTALL)
"""A table and what opens it, from its name on."""


def _number(value: int) -> str:
    size = abs(value)
    power = size.bit_length() - 1
    shown = f"2^{power}" if power >= 20 and size == 1 << power else "10^12" if size == NO_REWARD_BOUND else f"{size:,}"
    return "−" * (value < 0) + shown


def _default(name: str, value: object) -> str:
    if isinstance(value, StrEnum):
        return f"`{value}`"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        unset = value == UNSET and name in MAY_BE_UNSET
        return "unset: no bound" if unset or abs(value) == NO_REWARD_BOUND else _number(value)
    return "none"


def policy_fields() -> Iterator[str]:
    """Fields of a policy that take a number, a word or yes and no, with their values and defaults."""
    yield from _head("field", "values", "default")
    hints = get_type_hints(RunPolicy, include_extras=True)
    for field in fields(RunPolicy):
        values = ""
        for bounds in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(bounds, Between):
                values = f"{_number(bounds.low)} to {_number(bounds.high)}"
        if field.name in ENUMS:
            values = ", ".join(f"`{word}`" for word in ENUMS[field.name])
        if isinstance(field.default, bool):
            values = "true, false"
        if values:
            default = "`batch_groups`" if field.name == "max_queued_groups" else _default(field.name, field.default)
            yield _row(f"`{field.name}`", values, default)


def filters() -> Iterator[str]:
    """Filters in the order in which they are asked."""
    words = {"==": "is", "<": "below", ">": "above"}
    yield from _head("fact of the group", "ends it when", "counted as")
    for each in FILTERS:
        fact = each.fact.removesuffix("_milli").replace("_", " ")
        when = "it holds, and" if each.comparison == "==" else words[each.comparison]
        yield _row(fact, f"{when} `{each.field}`", f"`{each.statistic}`")


def statistics() -> Iterator[str]:
    """Counters of a run, with the metrics that show them."""
    yield from _head("counter", "counts", "metric")
    for name, each in STATISTICS.items():
        if each.metric:
            yield _row(f"`{name}`", each.text.rstrip("."), f"`rollout_buffer_{each.metric}_total`")


def _transitions(table: Mapping[str, frozenset[str]]) -> Iterator[str]:
    yield from _head("from", "to")
    for state, following in table.items():
        ends = ", ".join(f"`{one}`" for one in table if one in following)
        yield _row("(new)" if state == NEW else f"`{state}`", ends or "nothing: it is the end")


def group_transitions() -> Iterator[str]:
    """Dispositions, and what may follow each."""
    return _transitions(GROUP_TRANSITIONS)


def task_transitions() -> Iterator[str]:
    """States of tasks, and what may follow each."""
    return _transitions(TASK_TRANSITIONS)


def sizes() -> Iterator[str]:
    """Sizes of some fleets, as `rollout-buffer size` computes them."""
    yield from _head(
        "run", "GPUs", "groups/s", "payloads", "held", "decisions, cores", "shards", "replicas", "gives out first"
    )
    for name, fleet in FLEETS.items():
        for gpus in (1_024, 4_096, 16_384, 65_536):
            sized = size(replace(fleet, gpus=gpus), Machines())
            yield _row(
                name,
                f"{gpus:,}",
                f"{sized.fleet.groups_per_s:,.0f}",
                f"{sized.fleet.bytes_per_s / 1e9:.2f} GB/s",
                f"{sized.held_bytes / 1e9:,.0f} GB",
                f"{sized.decision_cores:.2f}",
                f"{sized.shards or 'none'}",
                f"{sized.replicas}",
                sized.limit,
            )


def costs_of_sizes() -> Iterator[str]:
    """Costs that sizes are computed from, and where they stand."""
    yield from _head("cost", "rpc process", "store", "source in bench/results")
    for name, call in costs.CALLS.items():
        yield _row(name, f"{call.rpc_us:,.0f} µs", f"{call.store_us:,.0f} µs", call.source)
    for name, way in costs.WAYS.items():
        yield _row(name, f"{way.service_s} s/GB", f"{way.store_s} s/GB", way.source)
    for name, one in costs.EACH.items():
        yield _row(name, "", f"{one.value:,.4g}", one.source)


def files() -> Iterator[str]:
    """Folders of the contract, the product and its deployment, and what each of their files says first."""
    kept = [one for root in ("proto", *PRODUCT, "deploy") for one in (ROOT / root).rglob("*") if one.suffix in OPENINGS]
    for folder in sorted({one.parent for one in kept}):
        yield f"\n**`{folder.relative_to(ROOT)}/`** {_said(folder / '__init__.py')}\n\n".replace("** \n", "**\n")
        for one in sorted(kept):
            if one.parent == folder and not one.stem.startswith("__"):
                yield f"- `{one.name}`: {_said(one)}\n".replace(": \n", "\n")


OPENINGS: Mapping[str, str] = {
    ".py": "",
    ".lua": r"((?:-- ?.*\n)+)",
    ".js": r"((?:// ?.*\n)+)",
    ".proto": r"((?:// ?.*\n)+)",
    ".css": "(?!)",
    ".html": r"<!-- (.*?) -->",
    ".tpl": r"\{\{/\* (.*?) \*/\}\}",
    ".yaml": r"((?:# ?.*\n)+)",
    ".sh": r"#!.*\n((?:# ?.*\n)+)",
}
"""Opening of a file that says what it is, by its suffix; of Python it is the docstring."""


def _said(file: Path) -> str:
    """First sentence of what a file says of itself; empty for none."""
    if not file.exists():
        return ""
    text = file.read_text("utf-8")
    if file.suffix == ".py":
        said = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    else:
        opening = re.match(OPENINGS[file.suffix], text)
        said = re.sub(r"(?m)^(--|//|#) ?", "", opening[1]) if opening else ""
    return re.split(r"(?<=\.)\s", " ".join(said.split()), maxsplit=1)[0].rstrip(".:")


FLEETS: Mapping[str, Fleet] = {
    "reasoning, 8 × 8k tokens, 9 bytes each": Fleet(
        gpus=1, tokens_per_s=2_000, length=8_000, gpus_per_engine=8, groups_per_batch=1_024, retained_steps=4
    ),
    "short, 8 × 500 tokens, 9 bytes each, engines of one GPU": Fleet(
        gpus=1, tokens_per_s=5_000, length=500, groups_per_batch=1_024, retained_steps=4
    ),
    "agentic, 8 × 128k tokens, 30 bytes each": Fleet(
        gpus=1,
        tokens_per_s=1_000,
        length=128_000,
        bytes_per_token=30,
        gpus_per_engine=8,
        groups_per_batch=512,
        retained_steps=4,
    ),
    "routed experts, 8 × 8k tokens, 393 bytes each": Fleet(
        gpus=1,
        tokens_per_s=2_000,
        length=8_000,
        bytes_per_token=393,
        gpus_per_engine=8,
        groups_per_batch=1_024,
        retained_steps=4,
    ),
    "routed experts, 8 × 16k tokens, 937 bytes each": Fleet(
        gpus=1,
        tokens_per_s=1_500,
        length=16_000,
        bytes_per_token=937,
        gpus_per_engine=16,
        groups_per_batch=1_024,
        retained_steps=4,
    ),
}
"""Fleets of the page on scale, but for their GPUs."""

TABLES: Mapping[str, Callable[[], Iterable[str]]] = {
    "sizes": sizes,
    "costs of sizes": costs_of_sizes,
    "policy fields": policy_fields,
    "filters": filters,
    "statistics": statistics,
    "group transitions": group_transitions,
    "task transitions": task_transitions,
    "files": files,
}


def _head(*cells: str) -> Sequence[str]:
    return _row(*cells), "|" + "---|" * len(cells) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def written(text: str) -> str:
    """A page with its tables as they are now. Raises KeyError for the name of a table that there is not."""
    return BLOCK.sub(lambda block: f"{block['name']}{block['open']}\n{''.join(TABLES[block['name']]())}\n", text)


def without_tables(text: str) -> str:
    """Text of a page that is written by hand: its tables are empty."""
    return BLOCK.sub(lambda block: block["name"] + block["open"], text)


def pages() -> list[Path]:
    """Pages that have such tables."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(page.read_text("utf-8"))]


def main(arguments: list[str]) -> int:
    """Write or check the pages; returns an exit code."""
    stale = [page for page in pages() if written(page.read_text("utf-8")) != page.read_text("utf-8")]
    if "--check" not in arguments:
        for page in stale:
            page.write_text(written(page.read_text("utf-8")), "utf-8")
        return 0
    for page in stale:
        print(f"{page.relative_to(ROOT)} is out of date; run `python -m scripts.rules_tables`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
