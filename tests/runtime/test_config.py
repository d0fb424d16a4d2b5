"""The TOML file and its overrides: what is wrong is named, with file, key and what could have been meant."""

from pathlib import Path

import pytest

from services.runtime.cluster import add_rank_arguments, rank_counts
from services.runtime.config import argument_parser, load_config
from services.runtime.errors import ConfigError

BAD_FILES = [
    ("[prefill]\nnum_pagse = 3\n", ("num_pagse", "num_pages")),
    ("[prefil]\nranks = 3\n", ("prefil", "known here are model, router, prefill, decode, log")),
    ("[decode]\nranks = 0\n", (">= 1", "decode.ranks")),
    ("[decode]\nranks = 'two'\n", ("decode.ranks", "int")),
    ("[decode]\ndrain_s = 0.0\n", ("> 0", "decode.drain_s")),
    ("[log]\nlevel = 'loud'\n", ("loud", "log.level")),
    ("[model\n", ("no valid TOML",)),
]


@pytest.mark.parametrize(("text", "words"), BAD_FILES)
def test_bad_file_is_named(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    for word in (str(file), *words):
        assert word in str(caught.value)


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.toml: cannot be read"):
        load_config(Path("/nowhere.toml"))


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("[decode]\nranks = 2\nnum_pages = 5\n")
    overrides = ["decode.ranks=3", "decode.ranks=4", 'decode.routers=["a:1", "b:2"]', "model.path=some/folder", "log.level=debug"]
    config = load_config(file, overrides)
    assert (config.decode.ranks, config.decode.num_pages, config.decode.routers) == (4, 5, ("a:1", "b:2"))
    assert (config.model.path, config.log.level, config.prefill.ranks) == ("some/folder", "debug", 1)


@pytest.mark.parametrize("override", ["decode.ranks", "ranks=3", "decode=3", "decode.ranks=0", "decode.nothing=1", "model.path.x=1"])
def test_bad_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config(None, [override])


def test_section_that_is_a_value_is_named(tmp_path: Path) -> None:
    file = tmp_path / "flat.toml"
    file.write_text("decode = 3\n")
    with pytest.raises(ConfigError, match="decode is a value, not a table"):
        load_config(file, ["decode.ranks=1"])


@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5", "", "²"])
def test_bad_number_of_ranks_names_the_variable_of_make(value: str) -> None:
    parser = argument_parser("test")
    add_rank_arguments(parser)
    with pytest.raises(ConfigError, match="PREFILL"):
        rank_counts(parser.parse_args([f"--prefill={value}"]))
    assert rank_counts(parser.parse_args(["--decode", "3"])) == (2, 3)
