"""How long drafts may lose, and when they are tried again."""

from baton.engine.speculation.balance import Balance


def plain_until_a_rest_ends(balance: Balance) -> int:
    return next(count for count in range(1, 100_000) if balance.add_plain())


def test_drafts_rest_once_they_have_lost_three_plain_steps() -> None:
    balance = Balance()
    balance.add(-2.9, drafts=True)
    assert not balance.resting
    balance.add(-0.2, drafts=False)
    assert balance.resting


def test_what_was_won_before_may_be_lost_up_to_a_few_plain_steps() -> None:
    balance = Balance()
    for _ in range(1000):
        balance.add(1.0, drafts=True)
    for _ in range(5):
        balance.add(-1.0, drafts=True)
        assert not balance.resting
    balance.add(-1.0, drafts=True)
    assert balance.resting


def test_each_vain_trial_doubles_the_rest_up_to_a_limit_and_wins_shorten_it() -> None:
    balance = Balance()
    rests = []
    for _ in range(8):
        balance.add(-6.0, drafts=True)
        assert balance.resting
        rests.append(plain_until_a_rest_ends(balance))
        assert not balance.resting
    assert rests[1:4] == [2 * rest for rest in rests[:3]]
    assert rests[-1] == rests[-2] == 16 * rests[0]
    for _ in range(30):
        balance.add(1.0, drafts=True)
    balance.add(-9.0, drafts=True)
    assert plain_until_a_rest_ends(balance) == rests[0]


def test_rests_without_trials_are_no_longer_each_time() -> None:
    balance = Balance()
    assert plain_until_a_rest_ends(balance) == plain_until_a_rest_ends(balance) == plain_until_a_rest_ends(balance)
