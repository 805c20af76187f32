"""Who imports whom, room by room: the table in docs/architecture.md. `python -m tests.support.rooms` prints it."""

from functools import cache

import grimp

GROUND = ("errors", "arrays", "batch")  # files that are no room
ORDER = {
    "sandbox": ("ground", "corrections", "metrics", "tabular", "theory", "output", "diagnosis", "experiments"),
    "realmodel": ("terminal", "policy", "dumps", "engine", "adapters", "training", "studies", "cli"),
}


def room(module: str) -> str:
    """sandbox.corrections.rules -> sandbox.corrections; the ground floor's three files are one room."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return f"{package}.{'ground' if name in GROUND else name}"


@cache
def imports() -> dict[str, frozenset[str]]:
    """Each room, and the other rooms whose modules its own import."""
    graph = grimp.build_graph("sandbox", "realmodel")
    found: dict[str, set[str]] = {f"{package}.{name}": set() for package, names in ORDER.items() for name in names}
    for module in graph.modules - {"sandbox", "realmodel"}:
        found[room(module)] |= {room(other) for other in graph.find_modules_directly_imported_by(module)}
    return {name: frozenset(others - {name}) for name, others in found.items()}


def table() -> str:
    """Markdown: a row a room, the rooms it imports from, in the order of the house."""
    places = list(imports())
    lines = ["| room | imports from |", "|---|---|"]
    for name, others in imports().items():
        lines.append(f"| {name} | {', '.join(sorted(others, key=places.index)) or '-'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
