"""Numbers of the command line: what is read, and what is refused before anything is done."""

import click
import pytest

from autosel.cli import options


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), (" 16 ", 16), ("0000000000001", 1), ("2147483647", options.MAX_TOKENS),
     ("0" * 5000 + "7", 7)],
)  # fmt: skip
def test_whole_numbers(text, number):
    assert options.whole_number(text) == number
    assert options.token_counts(text) == (number,)


@pytest.mark.parametrize(
    "text",
    ["0", "000", "-1", "1.0", "1e3", "٣", "²", "2147483648", "99999999999999999999",
     "000000000019999999999999999999999", "9" * 5000, "0" * 20 + "2147483648"],
)  # fmt: skip
def test_what_is_no_count_of_tokens(text):
    for read in (options.whole_number, options.token_counts, options.group_size, options.budget):
        if (read, text) == (options.group_size, "-1"):
            continue
        with pytest.raises(click.BadParameter, match=r"found .*, expected a"):
            read(text)


@pytest.mark.parametrize("days", ["36501", "999999", "9" * 23])
def test_no_age_is_older_than_the_calendar(autosel, days):
    ran = autosel("db", "prune", "--older-than", days)
    assert ran.status == 2
    assert "is not in the range 0<=x<=36500" in ran.error
