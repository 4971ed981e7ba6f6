"""The command that goes through small worlds. What it needs is imported only when it is called."""

import importlib
from typing import Any

import attrs
import click

from groupstate.cli.output import write_json
from groupstate.core.rules import rules_from_dict
from groupstate.errors import BadInput, BadSettings


@click.command(short_help="Go through every history of small worlds.")
@click.argument("names", nargs=-1, metavar="[WORLD]...")
@click.option("--larger", is_flag=True, help="The larger worlds of these names; a minute or two each.")
@click.option("--list", "listed", is_flag=True, help="Print the names of the worlds, and explore none.")
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="A setting of the rules, in each world; repeatable."
)
@click.option("--selection", default=None, metavar="MODULE:FUNCTION", help="A selection rule of your own.")
@click.option(
    "--patient", is_flag=True, help="The rule may keep a sampler waiting beside enough groups, with none in flight."
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object per world, with the shortest story of each cell."
)
@click.option("--states-max", type=click.IntRange(min=1), default=None, help="States at which a search gives up.")
@click.pass_context
def explore(
    ctx: click.Context,
    names: tuple[str, ...],
    larger: bool,
    listed: bool,
    changes: tuple[str, ...],
    selection: str | None,
    patient: bool,
    as_json: bool,
    states_max: int | None,
) -> None:
    """Go through every state that small worlds can come to, and check all invariants in each.

    A world is a few groups and sessions, the rules, and what may happen how often: failures, cancellations, late
    results, publications, crashes. Prints how many states and transitions there are, the cells of the table of
    transitions that no history goes through with the reason of each, and the shortest story of whatever is wrong.
    A selection rule of your own must serve whoever waits, once enough groups are sampleable and none is in flight.

    Exits with 0 if every invariant holds, 1 if something is wrong or a search gave up.

    \b
    Examples:
      groupstate explore
      groupstate explore drop crash --larger
      groupstate explore drop --set lag_max=1
      groupstate explore drop --selection my_rules.py:freshest
      groupstate explore drop --set selection=my_rules:freshest
    """
    worlds = importlib.import_module("groupstate.testing.exhaustive.worlds")
    known = worlds.LARGER if larger else worlds.WORLDS
    if listed:
        click.echo("\n".join(known))
        return
    for name in names:
        if name not in known:
            raise BadInput(f"there is no world {name!r}; worlds are {', '.join(known)}")
    changed = importlib.import_module("groupstate.runtime.settings").parsed_assignments(changes, "--set")
    if selection and "selection" in changed:
        raise BadInput("--selection and --set selection=... both say which groups a batch gets; give one of the two")
    own = selection and importlib.import_module("groupstate.runtime.settings").load_function(selection, "--selection")
    chosen, left_out = {}, {}
    for name in names or known:
        try:
            chosen[name] = _changed(known[name], changed, own, patient)
        except BadSettings as error:
            left_out[name] = error
    if names or not chosen:
        for name, problem in left_out.items():
            raise BadSettings(f"world {name!r} can't be gone through so: {problem}") from problem
    for name, problem in left_out.items():
        click.echo(f"{name} is left out: {problem}", err=True)
    if not _explored(chosen, states_max, as_json):
        ctx.exit(1)


def _changed(world: Any, changed: dict[str, Any], selection: Any, patient: bool) -> Any:
    """
    Raises:
        BadSettings: these don't go with the world's own rules.
    """
    rules = rules_from_dict({**world.rules.to_dict(), **changed})
    world = attrs.evolve(world, rules=rules, selection=selection, patient=patient)
    # Asked for now, so that what can't be is told before anything is gone through.
    _ = world.rules_in_force, world.own_rule
    return world


def _explored(worlds: dict[str, Any], states_max: int | None, as_json: bool) -> bool:
    """Explore them one by one, telling of each; False if something is wrong."""
    search = importlib.import_module("groupstate.testing.exhaustive.search")
    report = importlib.import_module("groupstate.testing.exhaustive.report")
    found = []
    for name, world in worlds.items():
        found.append(search.explore(world, states_max=states_max or search.STATES_MAX))
        if as_json:
            write_json(report.as_object(name, found[-1]))
        else:
            click.echo("\n".join(report.lines_of(name, found[-1])))
    if not as_json:
        click.echo("\n".join(report.summary(found)))
    return all(one.complete and not one.breaches for one in found)
