"""Which path has which handler."""

from gateway.http.app import App
from gateway.http.call import Context


def create_app(context: Context) -> App:
    """The application with all routes."""
    return App(context)
