"""`/ui/state`: the JSON that the page shows."""

from starlette.responses import Response

from baton.gateway.http.call import HttpCall
from baton.security import identity

_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


async def state(call: HttpCall) -> Response:
    """Answers with what the caller may see."""
    body = await call.context.view.shown_to(identity.current())
    return Response(body, media_type="application/json", headers=_HEADERS)
