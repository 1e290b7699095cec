"""The length of the prompts that make up most of the prompt work."""

from baton.gateway.fleet.prompt_lengths import PromptLengths


def test_before_the_first_prompt_it_is_unknown() -> None:
    lengths = PromptLengths()
    assert lengths.typical == 0
    lengths.add(0)  # a prefix cache has had all of it
    assert lengths.typical == 0


def test_prompts_of_one_length_have_this_length() -> None:
    lengths = PromptLengths()
    for _ in range(10):
        lengths.add(300)
    assert lengths.typical == 300


def test_a_few_long_prompts_count_more_than_many_short_ones_until_they_are_long_ago() -> None:
    lengths = PromptLengths()
    for number in range(200):
        lengths.add(8000 if number % 20 == 0 else 100)
    assert lengths.typical > 5000
    for _ in range(1000):
        lengths.add(100)
    assert lengths.typical < 200
