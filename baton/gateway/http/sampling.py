"""Adds the sampling parameters of `baton.core.sampling` to HTTP bodies, and copies them to messages.

Bodies check types; `baton.gateway.serving` checks ranges for all APIs. A body's own declaration of a parameter wins.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, create_model

from baton.core.errors import InvalidRequest
from baton.core.sampling import SAMPLING_FIELDS
from baton.core.sampling_field import U32_MAX, U64_MAX, Door, Kind, SamplingField
from baton.gateway.http.checking import U32, Items, M, Model, Stops, at_most
from baton.protos.v1 import common_pb2


def takes_sampling(door: Door) -> Callable[[type[M]], type[M]]:
    """Returns a class decorator that adds the sampling parameters of `door` to a body."""

    def extend(body: type[M]) -> type[M]:
        added: dict[str, Any] = {}
        for field in SAMPLING_FIELDS.values():
            name = field.name_at(door)
            if door in field.doors and door not in field.by_hand and name not in body.model_fields:
                added[name] = (_json_type(field) | None, Field(None, description=field.meaning))
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **added)

    return extend


def fill_sampling(sampling: common_pb2.SamplingParams, body: Model, door: Door) -> None:
    """Copies the body's parameters, except those that the code of `door` translates itself."""
    for field in SAMPLING_FIELDS.values():
        if door not in field.doors or door in field.by_hand:
            continue
        value = getattr(body, field.name_at(door))
        if value is None:
            continue
        if field.kind is Kind.TEXTS:
            getattr(sampling, field.name).extend([value] if isinstance(value, str) else value)
        elif field.kind is Kind.BIASES:
            getattr(sampling, field.name).update(_biases(field.name_at(door), value))
        elif field.kind is Kind.TOKENS:
            getattr(sampling, field.name).extend(value)
        else:
            setattr(sampling, field.name, value if field.lenient is None else field.lenient.read(value))


def _biases(name: str, given: Mapping[str, float]) -> dict[int, float]:
    """The biases by token.

    Raises:
        InvalidRequest: two keys name one token, such as "5" and "05".
    """
    keys: dict[int, str] = {}
    for key in given:
        first = keys.setdefault(int(key), key)
        if first != key:
            what = f"{name} has the token {int(key)} twice, as {first!r} and {key!r}"
            raise InvalidRequest(what, field=f"{name}.{key}", cure="give each token once")
    return {token_id: given[key] for token_id, key in keys.items()}


def _json_type(field: SamplingField) -> Any:
    match field.kind:
        case Kind.INTEGER:
            least = 0 if field.lenient is None else field.lenient.low
            # The limits of the message's types; the message could not carry a larger value to the range check.
            most = U64_MAX if field.bounds is not None and field.bounds.high == U64_MAX else U32_MAX
            return Annotated[int, Field(ge=least, le=most)]
        case Kind.NUMBER:
            return float
        case Kind.FLAG:
            return bool
        case Kind.TEXTS:
            return Stops
        case Kind.TOKENS:
            return Items[U32]
        case Kind.BIASES:
            assert field.items_max is not None, "without a limit, pydantic would describe any number of wrong keys"
            return Annotated[dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float], at_most(field.items_max)]
        case _:
            raise AssertionError(f"{field.name} has no form in JSON: list all HTTP doors in by_hand")
