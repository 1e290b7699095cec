"""The store of responses: bounded, with shared conversations, and apart for each owner."""

from baton.gateway.http.responses.store import ResponseStore, StoredResponse

KIB = 1024


def stored(key: str, parent: StoredResponse | None = None, *, kib: int = 1) -> StoredResponse:
    return StoredResponse(key, b"b" * (kib * KIB - 1000 - 4), b"in", b"ou", parent)


def test_a_response_is_found_by_its_owner_only() -> None:
    store = ResponseStore(10 * KIB)
    response = stored("a")
    assert store.put("me", response)
    assert store.get("me", "a") is response
    assert store.get("you", "a") is None
    assert not store.delete("you", "a")
    assert store.delete("me", "a")
    assert store.get("me", "a") is None
    assert store.size_bytes == 0


def test_the_least_recently_used_makes_room() -> None:
    store = ResponseStore(3 * KIB)
    for key in "abc":
        store.put("me", stored(key))
    store.get("me", "a")
    store.put("me", stored("d"))
    assert [key for key in "abcd" if store.get("me", key)] == ["a", "c", "d"]
    assert store.size_bytes == 3 * KIB


def test_a_caller_who_stores_much_takes_no_room_from_others() -> None:
    store = ResponseStore(4 * KIB)
    store.put("you", stored("mine"))
    for number in range(20):
        store.put("me", stored(str(number)))
    assert store.get("you", "mine") is not None


def test_a_conversation_keeps_the_items_of_responses_that_were_deleted() -> None:
    store = ResponseStore(10 * KIB)
    first = stored("a")
    second = stored("b", first)
    store.put("me", first)
    store.put("me", second)
    store.delete("me", "a")
    found = store.get("me", "b")
    assert found is not None
    assert [each.key for each in found.conversation()] == ["a", "b"]
    assert store.size_bytes == 2 * KIB
    store.delete("me", "b")
    assert store.size_bytes == 0


def test_a_conversation_whose_beginning_made_room_counts_again() -> None:
    store = ResponseStore(3 * KIB)
    first = stored("a")
    store.put("me", first)
    store.delete("me", "a")
    store.put("me", stored("b", first))
    assert store.size_bytes == 2 * KIB


def test_what_is_larger_than_the_store_is_not_kept_and_moves_nothing_out() -> None:
    store = ResponseStore(2 * KIB)
    store.put("me", stored("a"))
    assert not store.put("me", stored("b", kib=3))
    assert store.get("me", "a") is not None


def test_a_response_replaces_one_with_its_key_even_as_its_continuation() -> None:
    store = ResponseStore(10 * KIB)
    first = stored("a")
    store.put("me", first)
    store.put("me", stored("a", first))
    assert store.size_bytes == 2 * KIB
    store.delete("me", "a")
    assert store.size_bytes == 0


def test_a_long_conversation_is_released_without_recursion() -> None:
    store = ResponseStore(200 << 20)
    last = None
    for number in range(5000):
        last = StoredResponse(str(number), b"", b"", b"", last)
        if number % 500 == 499:
            store.put("me", last)
    for number in range(499, 5000, 500):
        store.delete("me", str(number))
    assert store.size_bytes == 0
