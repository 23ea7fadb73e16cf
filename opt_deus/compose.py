"""From a command line to checked cells: Hydra composes; everything is typed and refused before any weight is loaded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from opt_deus import checking
from opt_deus.checking import FACTORS, is_runtime, nearest
from opt_deus.combinations import Meaningless
from opt_deus.config import NO_NEW_CONTENT, AlignConfig, Cell, EvidenceConfig
from opt_deus.naming import cell_folder, one_spelling

ROOT = Path(__file__).resolve().parent
CONF = ROOT / "conf" if (ROOT / "conf").is_dir() else ROOT.parent / "conf"


@dataclass
class Job:
    """One cell asked for: its command line, its folder, and the reason where it is to be skipped."""

    overrides: list[str]
    cell: Cell
    folder: str
    skipped: str | None = None


def compose_jobs(overrides: list[str], multirun: bool, name: str, config_dir: str | None = None) -> list[Job]:
    """All cells of a command line, composed and checked.

    Raises ValueError with one message (key, value, remedy) for anything that is wrong in any of them.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        search = _search(config_dir)
        if not multirun and (many := next((each for each in _parse(overrides) if each.is_sweep_override()), None)):
            raise ValueError(f"{many.input_line}: several values make a grid; add -m, or write one list as [a,b].")
        lists = expand_sweep(overrides, search) if multirun else [overrides]
        jobs = [_job(_composed(search + job), job, name) for job in lists]
    return _without_doubles(_skip_meaningless(jobs, multirun))


def sweep_lines(overrides: list[str], config_dir: str | None = None) -> list[list[str]]:
    """The grids of a command line, each as overrides for Hydra's sweeper: what is typed, and the experiment's axes."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        grids = _grids(overrides, _search(config_dir))
    return [[*(f"{key}={value}" for key, value in grid.items()), *overrides] for grid in grids]


def expand_sweep(overrides: list[str], search: list[str]) -> list[list[str]]:
    """Every combination of every grid, once, in Hydra's own order; an experiment's axes come first, the user's win."""
    parsed = _parse(overrides)
    if any(each.key_or_group == "experiment" and each.is_sweep_override() for each in parsed):
        raise ValueError("+experiment: one named grid at a time; run the command once for each.")
    found: list[list[str]] = []
    for grid in _grids(overrides, search):
        axes = [_values(each) for each in _parse([f"{key}={value}" for key, value in grid.items()]) + parsed]
        known = {frozenset(each) for each in found}  # of earlier grids: one cell may be in several
        found += [list(each) for each in itertools.product(*axes) if frozenset(each) not in known]
    return found


def _grids(overrides: list[str], search: list[str]) -> list[dict[str, str]]:
    """Axes that the experiment adds to what is typed: hydra.sweeper.params, once for each entry of `grids`."""
    parsed = _parse(overrides)
    named = [each.input_line for each in parsed if each.key_or_group == "experiment" or each.is_hydra_override()]
    config = _composed(search + named)  # a knob may belong to a choice that only an axis makes
    typed = {each.key_or_group for each in parsed}
    params = dict(config.hydra.sweeper.params or {})
    grids = [{**params, **grid} for grid in config.grids or [{}]]
    return [{key: str(value) for key, value in grid.items() if key not in typed} for grid in grids]


def _search(config_dir: str | None) -> list[str]:
    return [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"] if config_dir else []


def _values(override: Override) -> list[str]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]  # as Hydra's own sweeper spells it
    if not override.is_discrete_sweep():
        raise ValueError(f"{override.input_line}: a grid needs listed values, e.g. {override.key_or_group}=1,2,3.")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _parse(overrides: list[str]) -> list[Override]:
    loader = GlobalHydra.instance().config_loader()
    try:
        return OverridesParser.create(config_loader=loader).parse_overrides(overrides)
    except HydraException as error:
        bad = next((each for each in overrides if each in str(error)), "")
        raise ValueError(
            f"{bad or 'override'}: cannot be read ({_first_line(error)}). Write key=value; quote a value that holds "
            "'=' or ',' as 'key=\"a=b\"'."
        ) from None


def _composed(overrides: list[str]) -> DictConfig:
    try:
        return compose("config", overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(overrides, error)) from None


def _explain(overrides: list[str], error: Exception) -> str:
    """One message for a command line that Hydra refused: the wrong word and the nearest right one."""
    loader = GlobalHydra.instance().config_loader()
    groups = {name: loader.get_group_options(name) for name in loader.list_groups("") if not name.startswith("hydra")}
    search = [each for each in overrides if each.startswith("hydra.searchpath=")]
    parsed = _parse([each for each in overrides if each not in search])
    valid_groups = []
    for each in parsed:
        key, value = each.key_or_group, str(each.value())
        if key in groups and value not in groups[key]:
            return f"{key}={value}: unknown; {nearest(value, groups[key])}."
        if key in groups:
            valid_groups.append(each.input_line)
    try:
        known = sorted(_flat_keys(compose("config", overrides=search + valid_groups)))
    except HydraException:
        return f"{' '.join(valid_groups)}: {_first_line(error)}"
    for each in parsed:
        key = each.key_or_group
        if key not in known and key not in groups and not key.startswith("hydra"):
            return f"{key}={each.value()}: there is no key {key!r}; {nearest(key, known)}."
    return f"{' '.join(overrides)}: {_first_line(error)}"


def _flat_keys(node: Any, prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for key in node:
        keys.add(f"{prefix}{key}")
        if isinstance(node._get_node(key), DictConfig):
            keys |= _flat_keys(node[key], f"{prefix}{key}.")
    return keys


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _job(config: DictConfig, overrides: list[str], name: str) -> Job:
    cell = to_cell(config, overrides, name)
    reason = None
    try:
        checking.check(cell)
    except Meaningless as error:
        reason = str(error)
    return Job(overrides, cell, cell_folder(cell), reason)


def to_cell(config: DictConfig, overrides: list[str], name: str | None = None) -> Cell:
    """The typed cell of a composed configuration. DictConfig ends here."""
    ours = OmegaConf.masked_copy(config, [key for key in config if key not in ("hydra", "grids")])
    plain = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    plain["eval"]["data"] = plain["eval"]["data"] or {}  # {} as a default would not let a dict replace it
    plain["name"] = name if plain.get("name") is None else plain["name"]
    typed_overrides = _typed_overrides(overrides)
    if plain["align"]["name"] in NO_NEW_CONTENT and "zero_init" not in typed_overrides:
        plain["zero_init"] = False
    plain["align"] = _with_knobs(plain["align"], AlignConfig)
    plain["evidence"] = _with_knobs(plain["evidence"], EvidenceConfig)
    for group in ("align", "evidence"):
        _check_types(group, plain[group])
    plain["reference"] = _reference(plain["update_match"])
    plain["overrides"] = {
        key: value for key, value in typed_overrides.items() if key not in FACTORS and not is_runtime(key)
    }
    hints = get_type_hints(Cell)
    unknown = sorted(set(plain) - set(hints))
    if unknown:
        raise ValueError(f"{unknown[0]}: there is no such key; {nearest(unknown[0], sorted(hints))}.")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Cell), plain))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or ""
        raise ValueError(f"{key}={_select(plain, key)}: {_first_line(error)}.") from None


def _with_knobs(choice: dict[str, Any], schema: type) -> dict[str, Any]:
    """The YAML of a method or a study: what every one has, and its own knobs apart."""
    known = {field.name for field in fields(schema)}
    knobs = {key: value for key, value in choice.items() if key not in known}
    return {key: value for key, value in choice.items() if key in known} | {"knobs": knobs}


def _check_types(group: str, choice: dict[str, Any]) -> None:
    """A knob has the kind (truth value, number, word) of its default in the YAML; a default of null takes any."""
    file = CONF / group / f"{choice['name']}.yaml"
    defaults = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    for knob, value in choice["knobs"].items():
        default = defaults.get(knob, value)
        if default is None or value is None:
            continue
        if any(isinstance(default, kind) != isinstance(value, kind) for kind in (bool, (int, float))):
            raise ValueError(f"{group}.{knob}={value}: must be of the kind of its default, {default}.")


def _reference(name: str | None) -> dict[str, Any] | None:
    """The method that update_match names, with its default knobs."""
    if name is None:
        return None
    makers = sorted(file.stem for file in (CONF / "align").glob("*.yaml") if file.stem not in NO_NEW_CONTENT)
    if name not in makers:
        raise ValueError(f"update_match={name}: no method that makes layers; {nearest(name, makers)}.")
    return _with_knobs(OmegaConf.to_container(OmegaConf.load(CONF / "align" / f"{name}.yaml")), AlignConfig)


def _select(plain: dict, key: str) -> Any:
    return OmegaConf.select(OmegaConf.create(plain), key) if key else ""


def _typed_overrides(overrides: list[str]) -> dict[str, str]:
    """key -> value of what was asked for, without Hydra's own keys and the experiment's name."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return {
        each.key_or_group: "" if each.is_delete() else one_spelling(each.value())
        for each in parsed
        if not each.is_hydra_override() and each.key_or_group != "experiment"
    }


def _skip_meaningless(jobs: list[Job], multirun: bool) -> list[Job]:
    """Skipped cells are recorded in a grid that crosses them; alone, or when all are, they are refused."""
    if all(job.skipped for job in jobs):
        raise ValueError(jobs[0].skipped)
    seen: dict[tuple, str] = {}
    for job in jobs:
        if job.skipped or job.cell.align.name not in NO_NEW_CONTENT:
            continue
        same = (job.cell.align.name, job.cell.seed, tuple(sorted(job.cell.overrides.items())))
        if same in seen:
            job.skipped = f"align={job.cell.align.name} takes no position: the same cell as {seen[same]}."
        seen.setdefault(same, job.folder)
    return jobs


def _without_doubles(jobs: list[Job]) -> list[Job]:
    folders: dict[str, Job] = {}
    for job in jobs:
        if job.folder in folders:
            raise ValueError(f"{' '.join(job.overrides)}: asked for twice (cell {job.folder}); name each value once.")
        folders[job.folder] = job
    return jobs
