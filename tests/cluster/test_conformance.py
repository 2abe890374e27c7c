"""Every row of the OpenAI surface against two pools under Ray, behind its proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.instance import Running, wait_until
from tests.conformance_rows import CHECKS, ROWS, body_of
from tests.conformance_tools import Api

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def api(baton: Running) -> Iterator[Api]:
    client = Api(baton.url)
    yield client
    client.close()


@pytest.mark.parametrize("row_id", sorted(ROWS))
def test_row(api: Api, row_id: str) -> None:
    CHECKS[row_id](api, body_of(row_id))
    assert api.get("/health").status_code == 200


def test_nothing_is_left_behind(baton: Running) -> None:
    wait_until(baton.is_idle, 5.0, "no block to be held")
