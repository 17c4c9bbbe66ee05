"""Messages with which calls are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[Exception], call: Callable[..., Any], /, *args: Any, **named: Any) -> str:
    """The message of the error of this class that a call raises."""
    with pytest.raises(error) as caught:
        call(*args, **named)
    return str(caught.value)


def one_line(error: type[Exception], call: Callable[..., Any], /, *args: Any, **named: Any) -> str:
    """The same, for a message of one line of less than 1,000 characters."""
    message = refused(error, call, *args, **named)
    assert "\n" not in message
    assert len(message) < 1000
    return message
