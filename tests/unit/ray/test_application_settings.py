"""What a Ray Serve application is given: the names and limits of `manyroots serve`."""

from __future__ import annotations

import pytest

from manyroots.errors import ConfigError

pytest.importorskip("ray")


def test_m01_settings_are_those_of_serve_as_texts_or_values() -> None:
    from manyroots.ray.application import parse

    engine, server = parse({"model": "a/b", "replicas": "3", "max-num-seqs": 16, "api-key": "k"})
    assert (engine.model.model, engine.scheduler.max_num_seqs) == ("a/b", 16)
    assert (server.replicas, server.replica_backend, server.port) == (3, "ray", 8001)
    assert server.api_key == "k"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"modle": "x"}, "'modle' is no setting"),
        ({"replicas": "0"}, "--replicas is 0"),
        ({"max_num_seqs": "many"}, "--max-num-seqs is 'many'"),
    ],
)
def test_m01_a_wrong_setting_names_the_value(arguments: dict[str, str], why: str) -> None:
    from manyroots.ray.application import parse

    with pytest.raises(ConfigError, match=why):
        parse(arguments)
