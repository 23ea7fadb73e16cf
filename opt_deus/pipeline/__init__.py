"""The one place where stages meet: run_cell reads like its outline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from opt_deus import evaluation, models, training
from opt_deus.config import NO_NEW_CONTENT, Cell
from opt_deus.pipeline import rounds, stages, studying
from opt_deus.pipeline.bench import Bench, State, device_of
from opt_deus.pipeline.exporting import export_cell, export_plans
from opt_deus.pipeline.record import failure, new_record, read_record, write_evidence, write_record, write_samples
from opt_deus.store import Artefact

__all__ = ["Bench", "export_cell", "export_plans", "read_record", "run_cell", "skip_cell", "stages"]


def run_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """Runs or resumes one cell and writes its record and samples; a failure becomes a record with its traceback."""
    record = new_record(cell)
    start, work = time.monotonic(), None
    try:
        with training.open_run(cell.tracker, cell.name, folder.name, record["config"], folder, cell.offline) as run:
            work = _Cell(cell, folder, record, run)
            work.run()
            run.log({f"perplexity/{stage}": value for stage, value in record["perplexity"].items() if value})
        record["status"] = "ok"
    except Exception as error:  # one cell's trouble never stops the others
        record.update(status="failed", reason=f"{type(error).__name__}: {error}", error=failure(error))
    record["provenance"]["seconds"] = round(time.monotonic() - start, 3)
    _write_log(folder, work.logs if work else [])
    write_record(folder, record)
    return record


def _write_log(folder: Path, logs: list[Path]) -> None:
    """log.jsonl: the training logs of the cell's stages, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(log.read_text() for log in logs))


def skip_cell(cell: Cell, folder: Path, reason: str) -> dict[str, Any]:
    """Records a combination that means nothing."""
    record = new_record(cell) | {"status": "skipped", "reason": reason}
    _write_log(folder, [])
    write_record(folder, record)
    return record


class _Cell:
    """One run of one cell: the bench, and the record as it fills."""

    def __init__(self, cell: Cell, folder: Path, record: dict[str, Any], run: Any) -> None:
        self.cell, self.folder, self.record, self.tracked = cell, folder, record, run
        self.bench = Bench(cell, device_of(cell.device))
        self.rows: dict[str, Any] = {}
        self.logs: list[Path] = []
        self.earlier: list[Artefact] = []  # pre-training of earlier rounds of growth

    def run(self) -> None:
        self._identify()
        base = State(self.bench.base.fingerprint, shared=stages.lowest_new(self.bench))
        self._evaluate("base", base)
        if self.cell.rounds > 1:
            self._grow_earlier_rounds()
        initial = self._expand()
        self._evaluate("initial", initial)
        self._study(initial)
        trained = self._train("cpt", initial)
        self._train("sft", trained)
        write_samples(self.folder, self.record, self.rows)

    def _identify(self) -> None:
        bench, record = self.bench, self.record
        record["provenance"] |= {
            "dtype": bench.precision,
            "device": bench.device.split(":")[0],
            "base_fingerprint": bench.base.fingerprint,
            "data_fingerprint": bench.corpus.fingerprint,
            "data_caveat": bench.corpus.caveat,
        }
        record["plan"] = {
            "base_layers": bench.plan.base_layers,
            "layers": bench.plan.layers,
            "inserted": bench.plan.inserted,
            "parents": bench.plan.parents,
        }
        record["cell"]["num_new_layers"] = len(bench.plan.inserted)
        shape = models.shape_of(bench.base.folder)
        base = models.parameter_counts(shape)["total"]
        total = models.parameter_counts(shape, bench.plan.layers)["total"]
        default = "all" if self.cell.align.name in NO_NEW_CONTENT else "new"
        everything = any((getattr(self.cell, stage).trainable or default) == "all" for stage in ("cpt", "sft"))
        trainable = total if everything else total - base
        record["parameters"] = {"base": base, "total": total, "trainable": trainable}

    def _grow_earlier_rounds(self) -> None:
        """From here on the cell works on the last round; its record shows the layers and the training of all."""
        done, self.bench = rounds.grow(self.bench)
        self.earlier = [each.trained for each in done]
        self.logs += [artefact.path / stages.LOG for artefact in self.earlier]
        plan = self.bench.plan
        parents = dict(zip(plan.inserted, plan.parents, strict=True))
        self.record["plan"] |= {
            "layers": plan.layers,
            "inserted": self.bench.new_layers,
            "parents": [parents.get(index, [None, None]) for index in self.bench.new_layers],  # see rounds
            "rounds": [
                {
                    "base_layers": each.base_layers,
                    "layers": each.layers,
                    "inserted": each.inserted,
                    "parents": each.parents,
                }
                for each in [*(each.plan for each in done), plan]
            ],
        }

    def _expand(self) -> State:
        artefact, state = stages.expand(self.bench)
        self._note("expand", artefact)
        self.record["expand"] = artefact.details
        return state

    def _study(self, initial: State) -> None:
        if self.cell.evidence.measure is None:
            return
        artefact = studying.study(self.bench, initial)
        self._note("evidence", artefact)
        self.record["evidence"][self.cell.evidence.name] = artefact.details["summary"]
        write_evidence(self.folder, studying.rows_of(artefact))

    def _train(self, stage: str, start: State) -> State:
        result = stages.train(self.bench, stage, start, callbacks=self.tracked.callbacks)
        if result is None:
            return start
        artefact, state = result
        self._note(stage, artefact)
        earlier = self.earlier if stage == "cpt" else []
        self.record[stage] = _summed([*(each.details for each in earlier), artefact.details])
        self.logs.append(artefact.path / stages.LOG)
        if "cpt_checkpoints" in self.cell.eval.stages:
            for name, checkpoint in stages.checkpoint_states(artefact, state).items():
                self._evaluate(name, checkpoint)
        self._evaluate(stage, state)
        return state

    def _evaluate(self, stage: str, state: State) -> None:
        asked = self.cell.eval.stages
        benchmarks = bool(asked) if stage == "base" else stage in asked or "-" in stage
        artefact, rows = stages.evaluate(self.bench, state, benchmarks=benchmarks)
        self._note(f"eval-{stage}", artefact)
        self.rows[stage] = rows
        self.record["eval"][stage] = evaluation.summarise(rows)
        self.record["perplexity"][stage] = evaluation.perplexity(rows)

    def _note(self, stage: str, artefact: Artefact) -> None:
        artefacts = self.record["artefacts"]
        if stage.startswith("eval-"):
            artefacts["eval"][stage.removeprefix("eval-")] = artefact.name
        else:
            artefacts[stage] = artefact.name
        if artefact.reused:
            artefacts["reused"].append(stage)


def _summed(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One stage's record from its rounds: tokens, steps and seconds add up, the rest is the last round's."""
    if len(parts) == 1:
        return parts[0]
    total = {key: sum(part[key] for part in parts) for key in ("tokens", "steps", "seconds")}
    return parts[-1] | total | {"tokens_per_second": round(total["tokens"] / total["seconds"], 1)}
