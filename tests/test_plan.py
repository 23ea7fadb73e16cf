"""Plans: every position policy against the contract, by properties over many sizes and by known answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opt_deus.config import PositionConfig
from opt_deus.plan import insert_after, positions, solar


def gaps(n, k, name, two_parents=True, **knobs):
    return positions(n, k, PositionConfig(name, **knobs), two_parents)


def test_top_for_32_layers_gives_the_papers_output_indices():
    plan = insert_after(32, gaps(32, 16, "top"))
    assert plan.inserted == list(range(16, 47, 2))
    assert plan.layers == 48
    assert plan.parents[0] == [15, 16] and plan.parents[-1] == [30, 31]


@given(n=st.integers(2, 60), k=st.integers(1, 60), name=st.sampled_from(["top", "bottom", "middle", "top_bottom"]))
def test_inner_policies_choose_k_distinct_inner_gaps_or_refuse(n, k, name):
    if k > n - 1:
        with pytest.raises(ValueError, match=f"num_new_layers={k}"):
            gaps(n, k, name)
        return
    chosen = gaps(n, k, name)
    assert len(set(chosen)) == k and chosen == sorted(chosen)
    assert chosen[0] >= 0 and chosen[-1] <= n - 2
    if name == "top":
        assert chosen[-1] == n - 2 and chosen[0] == n - 1 - k
    if name == "bottom":
        assert chosen == list(range(k))
    if name == "middle":
        assert chosen[0] == (n - 1 - k) // 2 and chosen[-1] - chosen[0] == k - 1
    if name == "top_bottom":
        assert chosen[: k // 2] == list(range(k // 2)) and chosen[k // 2 :] == list(range(n - 1 - (k - k // 2), n - 1))


@given(n=st.integers(2, 60), k=st.integers(1, 60))
def test_even_with_one_parent_follows_the_formula(n, k):
    if k > n:
        with pytest.raises(ValueError, match="num_new_layers"):
            gaps(n, k, "even", two_parents=False)
        return
    chosen = gaps(n, k, "even", two_parents=False)
    assert chosen == [(j + 1) * n // k - 1 for j in range(k)]
    assert len(set(chosen)) == k and chosen[-1] == n - 1


def test_llama_pro_spreads_after_every_second_layer():
    assert gaps(32, 16, "even", two_parents=False) == list(range(1, 32, 2))


def test_even_moves_the_last_gap_for_methods_with_two_parents_or_refuses():
    assert gaps(8, 4, "even") == [1, 3, 5, 6]
    with pytest.raises(ValueError, match="gap 6 is taken"):
        gaps(8, 8, "even")


@given(n=st.integers(3, 60), k=st.integers(1, 20), start=st.floats(0, 0.9), width=st.floats(0.05, 1))
def test_fraction_stays_in_its_window(n, k, start, width):
    stop = min(1.0, start + width)
    inside = [gap for gap in range(n - 1) if start <= (gap + 1) / n <= stop]
    if k > len(inside):
        with pytest.raises(ValueError, match="num_new_layers"):
            gaps(n, k, "fraction", start=start, stop=stop)
        return
    chosen = gaps(n, k, "fraction", start=start, stop=stop)
    assert len(set(chosen)) == k and set(chosen) <= set(inside)


def test_fraction_over_everything_is_the_whole_depth():
    assert gaps(9, 8, "fraction", start=0.0, stop=1.0) == list(range(8))


@pytest.mark.parametrize(("start", "stop"), [(0.5, 0.5), (0.8, 0.2), (-0.1, 0.5), (0.5, 1.5), (None, 1.0)])
def test_fraction_refuses_an_impossible_window(start, stop):
    with pytest.raises(ValueError, match="position.start"):
        gaps(8, 2, "fraction", start=start, stop=stop)


def test_k_need_not_divide_the_depth():
    assert gaps(4, 3, "top") == [0, 1, 2]
    assert insert_after(4, [0, 1, 2]).inserted == [1, 3, 5]


@pytest.mark.parametrize("after", [[], None, [2, 2], [-1], [4], [99]])
def test_explicit_refuses_empty_double_and_out_of_range(after):
    with pytest.raises(ValueError, match="position.after"):
        gaps(4, None, "explicit", after=after)


def test_explicit_last_gap_needs_a_method_with_one_parent():
    with pytest.raises(ValueError, match=r"position.after=\[3\].*both sides"):
        gaps(4, None, "explicit", after=[3])
    assert gaps(4, None, "explicit", two_parents=False, after=[3]) == [3]
    assert insert_after(4, [3]).parents == [[3, None]]
    assert gaps(4, 1, "explicit", after=[0]) == [0]
    with pytest.raises(ValueError, match="num_new_layers=2"):
        gaps(4, 2, "explicit", after=[0])


def test_single_is_one_gap():
    assert gaps(6, None, "single", gap=4) == [4]
    for gap in (None, -1, 5):
        with pytest.raises(ValueError, match="position.gap"):
            gaps(6, None, "single", gap=gap)


@given(n=st.integers(1, 60), k=st.integers(0, 80))
def test_solar_repeats_the_middle(n, k):
    if not 0 < k <= n:
        with pytest.raises(ValueError, match="num_new_layers"):
            solar(n, k)
        return
    plan = solar(n, k)
    layers = [slot.lower for slot in plan.slots]
    first = (n + k) // 2
    assert layers == list(range(first)) + list(range(n - (n + k - first), n))
    assert len(plan.inserted) == k
    assert sorted(plan.kept.values()) == list(range(n))  # every base layer once, in order
    assert list(plan.kept.values()) == sorted(plan.kept.values())


def test_solar_for_32_layers_is_the_published_24_and_24():
    layers = [slot.lower for slot in solar(32, 16).slots]
    assert layers == list(range(24)) + list(range(8, 32))
