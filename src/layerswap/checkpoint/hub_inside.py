"""Contact with the inside of huggingface_hub; a test of its own holds each promise."""

from collections.abc import Callable
from typing import Any


def client_factory() -> Callable[[], Any]:
    """Return what makes the Hub's HTTP clients: the user's own function, or the library's."""
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    return utils._http._GLOBAL_CLIENT_FACTORY  # type: ignore[no-any-return]
