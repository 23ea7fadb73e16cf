"""The command line: what is composed, named, skipped and refused, before anything is loaded."""

from __future__ import annotations

import pytest

from opt_deus.combinations import Meaningless
from opt_deus.compose import compose_jobs


def jobs(*overrides, multirun=True, name="stamp"):
    return compose_jobs(list(overrides), multirun, name)


def folders(*overrides):
    return [job.folder for job in jobs(*overrides)]


def test_the_default_grid_is_twelve_cells_with_the_contracts_names():
    grid = jobs("align=ot,avg", "zero_init=true,false", "seed=0,1,2")
    assert len(grid) == 12 and not any(job.skipped for job in grid)
    assert grid[0].folder == "ot-zero-top-seed0" and grid[-1].folder == "avg-nozero-top-seed2"
    assert grid[3].cell.zero_init is False and grid[3].cell.align.name == "ot" and grid[4].cell.seed == 1
    assert grid[0].cell.name == "stamp" and grid[0].cell.overrides == {}


def test_further_keys_become_readable_suffixes_and_run_time_keys_do_not():
    assert folders("num_new_layers=8", "norm_match=true", "cpt.lr=3e-4") == [
        "ot-zero-top-seed0-cpt.lr3e-4-normmatch-k8"
    ]
    assert folders("model=tiny", "device=cpu", "offline=true", "name=x", "store.root=/tmp/s") == [
        "ot-zero-top-seed0-tiny"
    ]
    assert folders("position=explicit", "position.after=[1,3]") == ["ot-zero-explicit-seed0-position.after1+3"]


def test_different_values_never_share_a_folder_and_no_name_holds_an_equals_sign():
    names = folders("model=path", '\'model.path="/data/a=b","/data/a_b","/data/a/b"\''.strip("'"))
    assert len(set(names)) == 3
    assert all("=" not in name and "/" not in name for name in names)


def test_quoted_equals_sign_and_list_values_arrive_whole():
    (job,) = jobs("model=path", 'model.path="/data/a=b"', multirun=False)
    assert job.cell.model.path == "/data/a=b"
    (job,) = jobs("eval=local", "eval.tasks=[piqa,arc_easy]", multirun=False)
    assert job.cell.eval.tasks == ["piqa", "arc_easy"]


def test_experiments_state_sweep_parameters_and_the_command_line_wins():
    grid = jobs("+experiment=review_scratch")
    assert len(grid) == 20 and grid[0].cell.model.name == "scratch_m"
    assert len(jobs("+experiment=review_scratch", "seed=7")) == 4
    assert jobs("+experiment=review_scratch", "seed=7")[0].folder == "ot-zero-top-seed7"


@pytest.mark.parametrize("name", ["overnight", "review_scratch", "paper_1b", "paper_8b", "debug"])
def test_every_experiment_composes(name):
    assert jobs(f"+experiment={name}")


def test_combinations_that_mean_nothing_are_skipped_in_a_grid_and_refused_alone():
    grid = jobs("align=ot,solar,none", "zero_init=true,false")
    skipped = {job.folder: job.skipped for job in grid if job.skipped}
    assert set(skipped) == {"solar-zero-top-seed0", "none-zero-top-seed0"}
    assert "zero_init=true means nothing with align=solar" in skipped["solar-zero-top-seed0"]
    with pytest.raises(ValueError, match="zero_init=true means nothing"):
        jobs("align=solar", "zero_init=true", multirun=False)
    assert jobs("align=solar", multirun=False)[0].cell.zero_init is False  # the default was not asked for
    positions = jobs("align=solar", "position=top,bottom")
    assert [bool(job.skipped) for job in positions] == [False, True]


def test_update_match_needs_an_update():
    assert [bool(job.skipped) for job in jobs("zero_init=true,false", "update_match=avg")] == [True, False]
    assert issubclass(Meaningless, ValueError)


REFUSED = [
    (["zero_int=true"], "zero_int.*'zero_init'"),
    (["align=ott"], "align=ott.*'ot'"),
    (["position=topp"], "position=topp.*'top'"),
    (["model=smollm"], "model=smollm"),
    (["seed=-1"], "seed=-1"),
    (["seed=abc"], "seed=abc"),
    (["zero_init=maybe"], "zero_init=maybe"),
    (["name=a/b"], "name='a/b'"),
    (["name=.."], "name='..'"),
    (["name=''"], "name"),
    (["cpt.lr=0"], "cpt.lr=0"),
    (["cpt.lr=nan"], "cpt.lr=nan"),
    (["cpt.lr=inf"], "cpt.lr=inf"),
    (["sft.lr=-1"], "sft.lr=-1"),
    (["cpt.tokens=0"], "cpt.tokens=0"),
    (["cpt.tokens=10"], "cpt.tokens=10.*one step"),
    (["cpt.batch_size=0"], "cpt.batch_size=0"),
    (["cpt.learning_rate=1"], "cpt.learning_rate"),
    (["cpt.warmup_ratio=1.5"], "cpt.warmup_ratio"),
    (["cpt.checkpoints=[2]"], "cpt.checkpoints"),
    (["cpt.trainable=some"], "cpt.trainable=some"),
    (["dtype=float8"], "dtype=float8"),
    (["device=tpu"], "device=tpu"),
    (["align.epsilon=0"], "align.epsilon=0"),
    (["align.epsilon=-1"], "align.epsilon=-1"),
    (["align.flow=up"], "align.flow=up"),
    (["align=avg", "align.epsilon=1"], "align.epsilon"),
    (["eval.limit=0"], "eval.limit=0"),
    (["eval.stages=[initial,ctp]"], "ctp.*'cpt'"),
    (["eval.stages=[cpt_checkpoints]"], "cpt.checkpoints"),
    (["num_new_layers=0"], "num_new_layers=0"),
    (["num_new_layers=-2"], "num_new_layers=-2"),
    (["+nonsense=1"], "nonsense"),
    (["seed=0,0"], "asked for twice"),
    (["seed=interval(0,1)"], "listed values"),
    (["a=b=c"], "a"),
    (["+experiment=nothing"], "nothing"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(each) for each, _ in REFUSED])
def test_bad_input_gets_one_message_with_key_and_value(overrides, message):
    with pytest.raises(ValueError, match=message) as refusal:
        jobs(*overrides)
    assert "\n" not in str(refusal.value)


def test_one_bad_cell_refuses_the_whole_grid():
    with pytest.raises(ValueError, match="seed=-1"):
        jobs("seed=0,1,-1")


def test_one_spelling_however_a_value_was_typed_alone_or_in_a_grid():
    for typed in ("3e-4", "0.0003", "3.0e-04"):
        assert jobs(f"cpt.lr={typed}", "seed=0,1")[0].folder == "ot-zero-top-seed0-cpt.lr3e-4"
        assert jobs(f"cpt.lr={typed}", multirun=False)[0].folder == "ot-zero-top-seed0-cpt.lr3e-4"
    (alone,) = jobs("norm_match=True", "cpt.tokens=2048", multirun=False)
    assert alone.cell.overrides == {"norm_match": "true", "cpt.tokens": "2048"}


def test_data_of_local_tasks_is_a_dict_of_the_users_own():
    (job,) = jobs("eval=local", "eval.tasks=[piqa]", "eval.data={piqa: a.jsonl}", multirun=False)
    assert job.cell.eval.data == {"piqa": "a.jsonl"}
    assert jobs("eval=pydocs")[0].cell.eval.data == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["align=ot,avg"], "align=ot,avg.*add -m"),
        (["seed=0,1"], "add -m"),
        (["cpt.schedule=cosin"], "cpt.schedule=cosin.*'cosine'"),
        (["align=ot_structured", "align.mlp=no"], "align.mlp=no"),
        (["align.epsilon=abc"], "align.epsilon=abc"),
        (["align.solver=partal"], "align.solver=partal.*nearest: 'partial'"),
    ],
)
def test_bad_single_cells_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        jobs(*overrides, multirun=False)
