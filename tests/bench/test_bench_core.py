"""`bench core` prints what CONTRACT §6 says; how fast it is, is not for a test on a busy machine to judge."""

import pytest

from lumenbox.bench import core


def test_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROUNDS": 2, "PLACEMENTS": 5, "REQUESTS": 30}.items():
        monkeypatch.setattr(core, name, value)
    document = core.run(workers=4, interrupted=20)
    assert (document["schema"], document["workers"], document["interrupted"]) == (1, 4, 20)
    assert document["requests_per_s"] > 0
    assert set(document["route_us"]) == {"restart", "fixed", "lumen", "box"}
    for quantiles in (document["place_us"], *document["route_us"].values()):
        assert 0 < quantiles["p50"] <= quantiles["p99"]
