"""Thinning: thousands of rows become few points, and no outlier gets lost on the way."""

import numpy as np

from expertmesh.report.plots import MAX_COLUMNS, MAX_POINTS, thin_grid, thin_line


def test_few_rows_stay_as_they_are() -> None:
    values = np.array([3.0, np.nan, 1.0])
    drawn = thin_line(np.array([1, 2, 3]), values)
    assert drawn.rows_per_point == 1
    for column in (drawn.middle, drawn.low, drawn.high):
        np.testing.assert_array_equal(column, values)
    assert drawn.smooth is None


def test_a_single_peak_among_thousands_of_rows_stays_visible() -> None:
    step = np.arange(1, 12_345)
    values = np.ones(len(step))
    values[7_777] = 50.0
    drawn = thin_line(step, values)
    assert len(drawn.step) <= MAX_POINTS
    assert drawn.rows_per_point == 21
    assert np.nanmax(drawn.high) == 50.0
    assert np.nanmax(drawn.middle) == 1.0
    assert drawn.step[0] == 11.0
    assert (np.diff(drawn.step) > 0).all()


def test_the_strong_line_is_a_median_of_neighbours_with_the_same_gaps() -> None:
    values = np.full(200, 2.0)
    values[50], values[100:110] = 99.0, np.nan
    drawn = thin_line(np.arange(200), values)
    assert drawn.smooth is not None
    np.testing.assert_array_equal(np.isnan(drawn.smooth), np.isnan(values))
    assert np.nanmax(drawn.smooth) == 2.0


def test_a_heat_map_keeps_the_worst_of_every_column() -> None:
    step = np.arange(10, 50_010, 10)
    values_SL = np.ones((len(step), 2), dtype=np.float32)
    values_SL[1_234, 1] = 7.0
    drawn = thin_grid(step, values_SL, np.nanmax)
    assert drawn.values_LC.shape == (2, MAX_COLUMNS)
    assert drawn.rows_per_column == 16
    assert (drawn.values_LC[0] == 1).all()
    column = int((step[1_234] - drawn.first) / (drawn.last - drawn.first) * MAX_COLUMNS)
    assert drawn.values_LC[1, column] == 7.0


def test_columns_where_nothing_was_reported_are_gaps() -> None:
    drawn = thin_grid(np.array([1, 2, 3, 9, 10]), np.ones((5, 1), dtype=np.float32), np.nanmax)
    assert np.isnan(drawn.values_LC[0]).tolist() == [False] * 3 + [True] * 5 + [False] * 2
    single = thin_grid(np.array([7]), np.ones((1, 1), dtype=np.float32), np.nanmin)
    assert single.values_LC.tolist() == [[1.0]]
