"""What a user may write, and what is said when it is wrong."""

import pytest

from vllm_trie.searches import BeamOptions, parse_options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "beam_width"),
        ({"beam_width": 0}, "beam_width.*greater than or equal to 1.*got 0"),
        ({"beam_width": -3}, "beam_width.*got -3"),
        ({"beam_width": "4"}, "beam_width.*integer.*got '4'"),
        ({"beam_width": 4.0}, "beam_width.*integer"),
        ({"beam_width": True}, "beam_width.*integer"),
        ({"beam_width": None}, "beam_width"),
        ({"beam_width": [4]}, "beam_width"),
        ({"beam_width": 4, "length_penalty": "long"}, "length_penalty"),
        ({"beam_width": 4, "length_penalty": float("nan")}, "length_penalty.*finite.*got nan"),
        ({"beam_width": 4, "length_penalty": 1e9}, "length_penalty.*5"),
        ({"beam_width": 4, "early_stopping": "maybe"}, "early_stopping: must be.*'maybe'"),
        ({"beam_width": 4, "early_stopping": 2}, "early_stopping.*got 2"),
        ({"beam_width": 4, "do_sample": "yes"}, "do_sample.*'yes'"),
        ({"beam_width": 4, "num_beam_groups": 3}, "num_beam_groups must divide beam_width=4"),
        ({"beam_width": 4, "diversity_penalty": -1.0}, "diversity_penalty"),
        ({"beam_width": 4, "diversity_penalty": 0.5}, "num_beam_groups of at least 2"),
        ({"beam_width": 4, "do_sample": True, "num_beam_groups": 2}, "exclude each other"),
        ({"beam_width": 4, "beam_length": 2}, "beam_length"),
    ],
)
def test_wrong_options_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        parse_options(BeamOptions, values)


def test_defaults_and_integers_for_numbers():
    options = parse_options(
        BeamOptions, {"beam_width": 4, "length_penalty": 2, "early_stopping": "never"}
    )
    assert options.length_penalty == 2.0
    assert options.early_stopping == "never"
    assert parse_options(BeamOptions, {"beam_width": 1}).early_stopping is False


@pytest.mark.parametrize(
    ("value", "meaning"), [(1, True), (0, False), ("true", True), ("False", False)]
)
def test_flags_as_http_sends_them(value, meaning):
    options = parse_options(
        BeamOptions, {"beam_width": 2, "early_stopping": value, "do_sample": value}
    )
    assert options.early_stopping is meaning
    assert options.do_sample is meaning
