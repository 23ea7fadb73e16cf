"""Figures from computed results: SVG for the report, PNG for slides. Draws, never computes."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path

import matplotlib
import pandas as pd

from opt_deus.reporting import studies
from opt_deus.reporting.document import Figure
from opt_deus.reporting.results import Results, primary_rows
from opt_deus.reporting.wording import counted

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend is chosen first)

from opt_deus.reporting.study_figures import COLOURS, study  # noqa: E402

STYLE = {"svg.hashsalt": "opt_deus", "svg.fonttype": "none", "font.size": 10, "axes.spines.top": False,
         "axes.spines.right": False, "figure.constrained_layout.use": True}  # fmt: skip


def draw(results: Results, folder: Path) -> dict[str, Figure]:
    """Writes every figure that the results allow into `folder`; name -> figure with its caption."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.svg"), *folder.glob("*.png")]:
        old.unlink()
    drawings = {each.__name__: partial(each, results) for each in (
        interaction, seeds, forest, initial_perplexity, learning_curves, losses
    )}  # fmt: skip
    for name, found in studies.summary_table(results.sweep).groupby("study", sort=False):
        drawings[f"evidence_{name}"] = partial(study, found)
    drawn = {}
    for name, drawing in drawings.items():
        with plt.rc_context(STYLE):
            caption = drawing()
            if caption is not None:
                drawn[name] = Figure(name, caption)
                figure = plt.gcf()
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                figure.set_layout_engine("none")  # keeps the layout just found
                figure.savefig(folder / f"{name}.png", dpi=150)
            plt.close("all")
    return drawn


def interaction(results: Results) -> str | None:
    """The 2x2: macro average against zero-initialisation, a line per alignment, one panel per position and setting."""
    means = results.means_of("macro", results.comparison.last_stage)
    if means.empty or means["zero_init"].nunique() < 2:
        return None
    panels = list(means.groupby(["position", "context"]))
    panels = [panel for panel in panels if panel[1]["zero_init"].nunique() > 1]
    if not panels:
        return None
    axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.6), sharey=True, squeeze=False)[1][0]
    for axis, ((position, context), group) in zip(axes, panels, strict=True):
        for order, (align, rows) in enumerate(group.sort_values("zero_init").groupby("align", sort=False)):
            places = rows["zero_init"].astype(float) + 0.03 * order
            _with_intervals(axis, places, rows, label=align, color=_colour(order))
        axis.set_xticks([0, 1], ["zero_init=false", "zero_init=true"])
        axis.set_xlim(-0.3, 1.4)
        axis.set_title(" ".join(part for part in (position, context) if part))
    axes[0].set_ylabel(f"macro average, {results.metric} (points)")
    axes[0].legend(frameon=False)
    stage = results.comparison.last_stage
    what = f"Macro average after stage {stage} by alignment and zero-initialisation"
    return f"{what}, 95% intervals over documents ({_counts(means)})."


def seeds(results: Results) -> str | None:
    """Every run's macro average, seeds joined by lines between alignments of the same other factors."""
    means = results.seed_means
    if means.empty:
        return None
    means = means[means["stage"] == results.comparison.last_stage]
    panels = [panel for panel in means.groupby(["zero_init", "position", "context"]) if panel[1]["align"].nunique() > 1]
    if not panels:
        return None
    axes = plt.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.4), sharey=True, squeeze=False)[1][0]
    for axis, ((zero_init, position, context), group) in zip(axes, panels, strict=True):
        for order, (seed, rows) in enumerate(group.groupby("seed")):
            axis.plot(rows["align"], rows["mean"], "o-", label=f"seed {seed}", color=_colour(order))
        axis.set_title(" ".join(part for part in (f"zero_init={str(zero_init).lower()}", position, context) if part))
        axis.margins(x=0.3)
    axes[0].set_ylabel(f"macro average, {results.metric} (points)")
    axes[-1].legend(frameon=False, fontsize=8)
    what = f"Every run after stage {results.comparison.last_stage} ({counted(len(means), 'run')})"
    return f"{what}; lines join the runs of one seed."


def forest(results: Results) -> str | None:
    """Simple effects of the alignments and interactions on the macro average, with intervals and detectable effects."""
    table = results.table
    chosen = table[(table["task"] == "macro") & (table["split"] == "all") & (table["factor"] != "zero_init")]
    chosen = primary_rows(chosen[chosen["stage"] == results.comparison.last_stage])
    chosen = chosen[chosen["ci_low"].notna()]
    if chosen.empty:
        return None
    axis = plt.subplots(figsize=(7, 1 + 0.4 * len(chosen)))[1]
    places = range(len(chosen))[::-1]
    margin = chosen["equivalence_margin"].iloc[0]
    axis.axvspan(-margin, margin, color="#999999", alpha=0.25, label=f"equivalence margin {margin}")
    axis.axvline(0, color="#555555", linewidth=0.8)
    errors = [chosen["estimate"] - chosen["ci_low"], chosen["ci_high"] - chosen["estimate"]]
    axis.errorbar(chosen["estimate"], places, xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
    labels = [f"{row['contrast']}\nlevel {row['level']}" for _, row in chosen.iterrows()]
    axis.set_yticks(places, labels, fontsize=7)
    axis.set_xlabel(f"difference in {results.metric} (points), 95% interval")
    axis.legend(frameon=False, fontsize=8)
    stage = results.comparison.last_stage
    return f"Differences of the macro average after stage {stage}, with 95% intervals ({_counts(chosen)})."


def initial_perplexity(results: Results) -> str | None:
    means = results.means_of("heldout", "initial")
    if means.empty:
        return None
    axis = plt.subplots(figsize=(7, 1 + 0.4 * len(means)))[1]
    places = range(len(means))[::-1]
    errors = [means["mean"] - means["ci_low"], means["ci_high"] - means["mean"]]
    axis.errorbar(means["mean"], places, xerr=errors, fmt="o", color=COLOURS[1], capsize=3)
    base = results.means_of("heldout", "base")
    if len(base):
        axis.axvline(base["mean"].iloc[0], color=COLOURS[0], linestyle="--", label="base")
        axis.legend(frameon=False)
    if means["mean"].max() > 5 * means["mean"].min():
        axis.set_xscale("log")
    axis.set_yticks(places, means["arm"])
    axis.set_xlabel("held-out token perplexity before training, 95% interval over documents")
    what = "Held-out perplexity of every arm right after expansion, before any training"
    return f"{what}, 95% intervals ({_counts(means)})."


def learning_curves(results: Results) -> str | None:
    """Macro average and perplexity against the stages, where at least two were evaluated."""
    stages = list(dict.fromkeys(results.means["stage"])) if len(results.means) else []
    stages = [stage for stage in stages if stage != "base"]
    panels = [(task, label) for task, label in (("macro", f"{results.metric} (points)"), ("heldout", "perplexity"))
              if (results.means["task"] == task).any()] if stages else []  # fmt: skip
    if len(stages) < 2 or not panels:
        return None
    axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.6), squeeze=False)[1][0]
    for axis, (task, label) in zip(axes, panels, strict=True):
        rows = results.means[(results.means["task"] == task) & results.means["stage"].isin(stages)]
        for order, (arm, group) in enumerate(rows.groupby("arm", sort=False)):
            places = [stages.index(stage) + 0.05 * order for stage in group["stage"]]
            _with_intervals(axis, places, group, label=arm, color=_colour(order))
        axis.set_xticks(range(len(stages)), stages)
        axis.set_ylabel(label)
    if rows["mean"].max() > 5 * rows["mean"].min():
        axes[-1].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    parts = "; ".join(f"{label}: {_counts(results.means[results.means['task'] == task])}" for task, label in panels)
    return f"Means over seeds at every evaluated stage, with 95% intervals over documents ({parts})."


def losses(results: Results) -> str | None:
    """Training loss by tokens, one thin line per run, one panel per stage."""
    lines: dict[str, list[tuple[str, pd.DataFrame]]] = defaultdict(list)
    for cell, entries in results.sweep.logs.items():
        frame = pd.DataFrame(entries)
        for stage, rows in frame.groupby("stage") if len(frame) else ():
            lines[str(stage)].append((results.sweep.short(results.sweep.records[cell]["cell"]["arm"]), rows))
    if not lines:
        return None
    axes = plt.subplots(1, len(lines), figsize=(4.8 * len(lines), 3.6), squeeze=False)[1][0]
    arms = list(dict.fromkeys(arm for runs in lines.values() for arm, _ in runs))
    for axis, (stage, runs) in zip(axes, lines.items(), strict=True):
        labelled = set()
        for arm, rows in runs:
            label = None if arm in labelled else arm
            labelled.add(arm)
            axis.plot(rows["tokens"], rows["loss"], linewidth=1, alpha=0.8, color=_colour(arms.index(arm)), label=label)
        axis.set_title(stage)
        axis.set_xlabel("tokens")
    axes[0].set_ylabel("training loss (nats per token)")
    axes[0].legend(frameon=False, fontsize=8)
    return f"Training loss of every run ({counted(len(results.sweep.logs), 'run')})."


def _with_intervals(axis: plt.Axes, places: object, rows: pd.DataFrame, **style: object) -> None:
    errors = [rows["mean"] - rows["ci_low"], rows["ci_high"] - rows["mean"]]
    axis.errorbar(places, rows["mean"], yerr=errors, fmt="o-", capsize=3, **style)


def _counts(rows: pd.DataFrame) -> str:
    """ "n = 200 documents, 3 seeds": the most that any row has."""
    return f"n = {counted(int(rows['n'].max()), 'document')}, {counted(int(rows['num_seeds'].max()), 'seed')}"


def _colour(order: int) -> str:
    return COLOURS[order % len(COLOURS)]
