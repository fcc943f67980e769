"""Published figures: each has a source that can be opened, and says one thing."""

from __future__ import annotations

import re
from itertools import pairwise

from ringsim.plot.charts import FIGURES, LINE_RATES


def test_every_figure_has_a_source_and_one_number() -> None:
    for figure in FIGURES:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", figure.date)
        owner, number = re.fullmatch(r"https://github\.com/[\w-]+/([\w-]+)/issues/(\d+)", figure.url).groups()
        assert figure.source == f"{owner} #{number}"
        assert (figure.latency_us is None) != (figure.bandwidth_gb_per_s is None)
        assert (figure.size_bytes is None) == (figure.latency_us is None)
        assert figure.remark


def test_no_published_bandwidth_is_above_the_line_rate() -> None:
    rates = {rate.link: rate for rate in LINE_RATES}
    assert set(rates) <= {figure.link for figure in FIGURES}
    for figure in FIGURES:
        if figure.link in rates and figure.bandwidth_gb_per_s is not None:
            assert figure.bandwidth_gb_per_s < rates[figure.link].one_way_gb_per_s
    assert all(rate.both_ways_gb_per_s == 2 * rate.one_way_gb_per_s for rate in LINE_RATES)


def test_sizes_of_one_source_ascend() -> None:
    for one, other in pairwise(figure for figure in FIGURES if figure.size_bytes is not None):
        assert one.source != other.source or one.size_bytes < other.size_bytes
